"""Chat messages from the form in which OpenAI's clients send them to the one that chat templates read."""

from __future__ import annotations

import json
from typing import Any

from dspark_trt.server.openai.errors import ApiError
from dspark_trt.serving.limits import shorten


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: content as one text, the arguments of tool calls as objects.

    Raises ApiError for content that is no text.
    """
    return [_chat_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _chat_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise ApiError(400, f"{where}.role: expected a string, found {shorten(role)}", param="messages")
    changed = {**message, "role": "system" if role == "developer" else role}
    content = message.get("content")
    if isinstance(content, list):
        changed["content"] = "".join(
            _text_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)
        )
    elif content is not None and not isinstance(content, str):
        raise ApiError(400, f"{where}.content: expected a text or a list of parts", param="messages")
    if isinstance(calls := message.get("tool_calls"), list):
        changed["tool_calls"] = [_tool_call(call) for call in calls]
    return changed


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise ApiError(400, f"{where}: expected a part of type text, found {shorten(kind)}", param="messages")


def _tool_call(call: Any) -> Any:
    """OpenAI's clients send the arguments as JSON in a string, templates write them as JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return call

"""The target in PyTorch: it writes answers in large batches, then reads them again in float32 for taps and logits.

Shape letters: `B` answers of a batch, `P` positions, `D` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from dspark_trt.checkpoints.spec import TargetCheckpoint
from dspark_trt.errors import CheckpointError
from recipe.answer import Answer


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int
    temperature: float  # 0: the most likely token
    top_k: int = 64


class Target:
    """A Llama target in one element type: bfloat16 to write fast, float32 to read exactly."""

    def __init__(self, checkpoint: TargetCheckpoint, element_type: torch.dtype, device: str) -> None:
        """Raises CheckpointError for a family that this recipe does not know."""
        spec = checkpoint.spec
        if spec.family != "llama" or spec.decoder.rope.rope_type != "default" or not spec.is_head_tied:
            raise CheckpointError(
                f"the recipe reads Llama targets with a tied head and plain RoPE, found family {spec.family!r}, RoPE "
                f"{spec.decoder.rope.rope_type!r}, tied head {spec.is_head_tied}; extend recipe/target.py"
            )
        self.eos_token_ids = spec.eos_token_ids
        self._device = device
        self._model = LlamaForCausalLM(_config(checkpoint)).eval()
        names = checkpoint.weights.names()
        state = {f"model.{name}": torch.from_numpy(np.array(checkpoint.weights.array(name))) for name in names}
        unexpected = self._model.load_state_dict(state, strict=False).unexpected_keys
        if unexpected:
            raise CheckpointError(f"the target has tensors that the recipe does not know: {', '.join(unexpected)}")
        self._model.to(device, element_type)

    @property
    def embedding(self) -> torch.Tensor:
        """[V, D]; the head as well."""
        return self._model.get_input_embeddings().weight.detach()

    @torch.inference_mode()
    def write(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, before_step: Callable[[], object] = lambda: None
    ) -> list[list[int]]:
        """Prompt and answer of each prompt, the end-of-sequence token left out. `before_step` may pause the writing."""
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self.eos_token_ids[0], device=self._device)
        is_token = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left: all answers begin in the same column
            ids[row, longest - len(prompt) :] = torch.tensor(prompt, device=self._device)
            is_token[row, longest - len(prompt) :] = 1
        choice = (
            {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k}
            if sampling.temperature
            else {"do_sample": False}
        )
        written = self._model.generate(
            ids,
            attention_mask=is_token,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(self.eos_token_ids),
            pad_token_id=self.eos_token_ids[0],
            stopping_criteria=StoppingCriteriaList([_NeverStop(before_step)]),
            **choice,
        )
        answers = (self._until_end(row) for row in written[:, longest:].tolist())
        return [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]

    def _until_end(self, answer: list[int]) -> list[int]:
        ends = [at for at, token in enumerate(answer) if token in self.eos_token_ids]
        return answer[: ends[0]] if ends else answer

    @torch.inference_mode()
    def read(self, ids: Sequence[int], num_prompt_tokens: int, tap_layers: Sequence[int]) -> Answer:
        """Teacher-forced: taps, last hidden state and log-sum-exp over all V ids, at every position.

        A tap of the last layer is what transformers holds there, behind the final norm: DeepSpec's format has it so.
        """
        tokens = torch.tensor(ids, device=self._device)
        output = self._model.model(tokens[None], output_hidden_states=True, use_cache=False)
        last = output.last_hidden_state[0]
        taps = torch.cat([output.hidden_states[layer + 1][0] for layer in tap_layers], dim=-1)
        log_sum_exp = torch.cat([(rows @ self.embedding.T).logsumexp(dim=-1) for rows in last.split(256)])
        return Answer(
            ids=tokens.int().cpu(),
            taps=taps.bfloat16().cpu(),
            hidden=last.float().cpu(),
            log_sum_exp=log_sum_exp.float().cpu(),
            num_prompt_tokens=num_prompt_tokens,
        )


class _NeverStop(StoppingCriteria):
    """The place where transformers lets others look in between two steps."""

    def __init__(self, before_step: Callable[[], object]) -> None:
        self._before_step = before_step

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **unused: object) -> torch.Tensor:
        self._before_step()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _config(checkpoint: TargetCheckpoint) -> LlamaConfig:
    decoder = checkpoint.spec.decoder
    return LlamaConfig(
        vocab_size=decoder.vocab_size,
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_hidden_layers=decoder.num_layers,
        num_attention_heads=decoder.num_heads,
        num_key_value_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        max_position_embeddings=decoder.max_position_embeddings,
        rms_norm_eps=decoder.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": decoder.rope.theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )

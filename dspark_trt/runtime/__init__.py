"""The decoding loop and its stages: request -> row -> draft -> schedule -> verify -> accept -> emit.

Engines are injected (contract/protocol.py). Nothing in here reads checkpoints or graphs.
"""

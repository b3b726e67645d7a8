"""The form of an Acceptance: everything about the operation that is fixed when an engine is built."""

from __future__ import annotations

from dataclasses import dataclass

# `outcomes` of a row; anything else is the token that is drawn there
ACCEPTED = -1
NOT_FINITE = -2  # a logit of the row is NaN or infinite
ALL_MASKED = -3  # no token is left
NOT_REACHED = -4  # behind the end of its block

MASKED_LOGIT = -3e38  # of a token that must not come: finite, and has no weight at any temperature
RESIDUAL_MASS_EPSILON = 1e-8  # below it draft and target distribution are equal up to rounding
MAX_TOP = 20  # most probable tokens that are reported
MAX_VOCAB_SIZE = (1 << 19) - 1  # sums of so many weights of 2^44 units fit into 63 bits
MAX_SLOTS = 63  # a token's masked slots are the bits of one int64
MASS_BITS = 44  # weights are summed as multiples of 2^-44 of the largest
PROB_BITS = 60  # probabilities as multiples of 2^-60


@dataclass(frozen=True, slots=True)
class AcceptanceForm:
    """Acceptance of draft blocks and draws of their last tokens (paper section 2.1)."""

    vocab_size: int
    num_slots: int  # rows of a block at most: its drafts and the bonus
    draft_vocab_size: int = 0  # columns of draft logits; 0: the target's vocabulary, column by column
    block_tokens: int = 2048  # that a program has in its registers
    segment_blocks: int = 4  # that a program works on, one after the other
    num_candidates: int = 4096  # of a truncated distribution, kept apart; what has more is read whole

    def __post_init__(self) -> None:
        """Raises ValueError when the kernels cannot compute the form."""
        for name, least, most in (
            ("vocab_size", 1, MAX_VOCAB_SIZE),
            ("num_slots", 1, MAX_SLOTS),
            ("draft_vocab_size", 0, self.vocab_size),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"Acceptance: {name}: expected {least} to {most}, found {getattr(self, name)}")

    @property
    def num_draft_columns(self) -> int:
        return self.draft_vocab_size or self.vocab_size

    @property
    def segment_tokens(self) -> int:
        return self.block_tokens * self.segment_blocks

    @property
    def num_segments(self) -> int:
        return -(-self.vocab_size // self.segment_tokens)

    @property
    def num_draft_segments(self) -> int:
        return -(-self.num_draft_columns // self.segment_tokens)

    @property
    def num_blocks(self) -> int:
        return -(-self.vocab_size // self.block_tokens)

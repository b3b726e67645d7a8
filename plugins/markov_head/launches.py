"""Which kernels a MarkovHead of one form has, and the order in which a call launches them. Needs nothing but Python.

    vanilla          (tile_logits, draw_token) x G, confidence                                2 G + 1 launches
    gated, rnn       project_hidden, (feature, tile_logits, draw_token) x G, confidence       3 G + 2
    with top_n       select_candidates first, candidate_logits in the place of tile_logits    + 1

Shape letters: `R` requests, `G` gamma, `V` vocabulary, `D` hidden, `r` Markov rank, `C` tiles, `N` top_n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dspark_trt_plugins.markov_head.form import W1, W2, MarkovHeadForm
from dspark_trt_plugins.operation import Extents, Kernel, Launch, Tensor, attributes_of, next_power_of_2

PROJECTIONS = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}
CONFIDENCE = "confidence_head.proj"

BLOCK_V = 128  # tokens of a tile
BLOCK_CANDIDATES = 64  # the same with top_n, where no request shares its rows with another
# Requests of a program and its warps; the smallest block that holds all requests is taken, else the largest.
REQUEST_BLOCKS = {16: 4, 64: 8}
REQUEST_BLOCKS_FLOAT32 = {16: 4, 32: 8}  # no tensor cores: a larger block does not fit the registers
PROJECTED_OUT = 64  # outputs of a projection that a program computes
FEATURE_BLOCK = {"BLOCK_R": 16, "BLOCK_OUT": 32}  # requests and outputs of a feature's program
BLOCK_D = 1024  # hidden entries that the confidence reads at a time
BLOCK_SELECT = 4096  # base logits that the selection reads at a time


@dataclass(frozen=True, slots=True)
class MarkovHeadOperation:
    """`operation.Operation` of one form.

    Raises ValueError when the form does not say what the kernels need.
    """

    form: MarkovHeadForm

    def __post_init__(self) -> None:
        if self._reads_hidden and self.form.hidden_size <= 0:
            raise ValueError(f"{self.name}: expected hidden_size > 0 in the form, found {self.form.hidden_size}")

    @property
    def name(self) -> str:
        return "MarkovHead"

    @property
    def package(self) -> str:
        return "dspark_trt_plugins.markov_head"

    @property
    def attributes(self) -> Mapping[str, int | str]:
        return attributes_of(self.form)

    @property
    def _is_projected(self) -> bool:
        return self.form.has_markov_head and self.form.head_type in PROJECTIONS

    @property
    def _reads_hidden(self) -> bool:
        return self._is_projected or self.form.has_confidence_head

    @property
    def _num_projected(self) -> int:
        """Outputs of the projection that makes the feature."""
        return self.form.markov_rank * (3 if self.form.head_type == "rnn" else 1)

    @property
    def _tile_size(self) -> int:
        return BLOCK_CANDIDATES if self.form.top_n else BLOCK_V

    @property
    def _num_places(self) -> int:
        return self.form.top_n or self.form.vocab_size

    @property
    def _num_tiles(self) -> int:
        return -(-self._num_places // self._tile_size)

    @property
    def _request_blocks(self) -> Mapping[int, int]:
        return REQUEST_BLOCKS_FLOAT32 if self.form.weight_type == "float32" else REQUEST_BLOCKS

    def _request_block(self, count: int) -> int:
        blocks = self._request_blocks
        return next((block for block in blocks if count <= block), max(blocks))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        form = self.form
        gamma, rank, hidden, vocab = form.gamma, form.markov_rank, form.hidden_size, form.vocab_size
        confidence_width = hidden + (rank if form.is_confidence_with_markov else 0)
        weight_shapes = {
            W1: (vocab, rank),
            W2: (vocab, rank),
            f"{PROJECTIONS['gated']}.weight": (rank, hidden + rank),
            f"{PROJECTIONS['gated']}.bias": (rank,),
            f"{PROJECTIONS['rnn']}.weight": (3 * rank, 2 * rank + hidden),
            f"{PROJECTIONS['rnn']}.bias": (3 * rank,),
            f"{CONFIDENCE}.weight": (1, confidence_width),
            f"{CONFIDENCE}.bias": (1,),
        }
        return (
            Tensor("base_logits", form.logits_type, ("R", gamma, vocab)),
            Tensor("hidden", form.weight_type, ("R", gamma, hidden or "D")),
            Tensor("anchor_ids", "int64", ("R",)),
            Tensor("temperatures", "float32", ("R",)),
            Tensor("uniforms", "float32", ("R", gamma)),
            *(Tensor(name, form.weight_type, weight_shapes[name]) for name in form.weight_names),
        )

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        gamma = self.form.gamma
        confidence = (Tensor("confidence_logits", "float32", ("R", gamma)),) if self.form.has_confidence_head else ()
        return (
            Tensor("draft_ids", "int64", ("R", gamma)),
            Tensor("draft_logits", "float32", ("R", gamma, self.form.vocab_size)),
            *confidence,
        )

    @property
    def workspace(self) -> tuple[Tensor, ...]:
        gamma, rank = self.form.gamma, self.form.markov_rank
        tensors = [
            Tensor("tile_max", "float32", ("R", self._num_tiles)),
            Tensor("tile_argmax", "int32", ("R", self._num_tiles)),
            Tensor("tile_sum", "float32", ("R", self._num_tiles)),
        ]
        if self.form.top_n:
            tensors.append(Tensor("candidates", "int32", ("R", gamma, self.form.top_n)))
        if self._is_projected:
            tensors.append(Tensor("projected", "float32", ("R", gamma, self._num_projected)))
            tensors.append(Tensor("feature", "float32", ("R", rank)))
        if self._is_projected and self.form.head_type == "rnn":
            tensors.append(Tensor("state", "float32", (2, "R", rank)))
        return tuple(tensors)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        kernels = []
        num_stages = 2 if self.form.weight_type == "float32" else 3
        for block, num_warps in self._request_blocks.items():
            size = {"BLOCK_R": block}
            if self._is_projected:
                constants = size | {"BLOCK_OUT": PROJECTED_OUT}
                kernels.append(
                    Kernel(
                        f"project_hidden_{block}", "kernel_features.project_hidden", constants, num_warps, num_stages
                    )
                )
            if not self.form.top_n:
                kernels.append(Kernel(f"tile_logits_{block}", "kernel.tile_logits", size, num_warps, num_stages))
        if self._is_projected:
            feature = "gated_feature" if self.form.head_type == "gated" else "recurrent_feature"
            kernels.append(Kernel("feature", f"kernel_features.{feature}", FEATURE_BLOCK, num_warps=8))
        if self.form.top_n:
            kernels.append(Kernel("select_candidates", "kernel_candidates.select_candidates", num_warps=16))
            kernels.append(Kernel("candidate_logits", "kernel_candidates.candidate_logits"))
        kernels.append(Kernel("draw_token", "kernel.draw_token", num_warps=8))
        if self.form.has_confidence_head:
            kernels.append(Kernel("confidence", "kernel.confidence"))
        return tuple(kernels)

    @property
    def arguments(self) -> Mapping[str, str | int | None]:
        form = self.form
        projection = PROJECTIONS.get(form.head_type) if form.has_markov_head else None
        is_scored_with_w1 = form.has_markov_head and form.is_confidence_with_markov
        narrowest, widest = (
            16,
            32 if form.weight_type == "float32" else 64,
        )  # of a matrix product: to 128 bytes of a row
        tensors = {tensor.name: tensor.name for tensor in (*self.inputs[:5], *self.outputs, *self.workspace)}
        return {
            "candidates": None,
            "feature": None,
            **tensors,
            "w1": W1 if form.has_markov_head else None,
            "w2": W2 if form.has_markov_head else None,
            "projection": f"{projection}.weight" if projection else None,
            "projection_bias": f"{projection}.bias" if projection else None,
            "scorer": f"{CONFIDENCE}.weight",
            "scorer_bias": f"{CONFIDENCE}.bias" if form.has_confidence_bias else None,
            "scored_w1": W1 if is_scored_with_w1 else None,
            "GAMMA": form.gamma,
            "VOCAB": form.vocab_size,
            "RANK": form.markov_rank,
            "D": form.hidden_size,
            "TOP_N": form.top_n,
            "NUM_PLACES": self._num_places,
            "NUM_TILES": self._num_tiles,
            "OUT": self._num_projected,
            "STRIDE": form.hidden_size + form.markov_rank * (2 if form.head_type == "rnn" else 1),
            "COLUMN": 2 * form.markov_rank if form.head_type == "rnn" else 0,
            "BLOCK_V": self._tile_size,
            "BLOCK_K": min(max(next_power_of_2(form.markov_rank), narrowest), widest),
            "BLOCK_HIDDEN": widest,
            "BLOCK_D": BLOCK_D,
            "BLOCK_RANK": next_power_of_2(form.markov_rank),
            "BLOCK_TILES": next_power_of_2(self._num_tiles),
            "BLOCK_SELECT": BLOCK_SELECT,
        }

    def launches(self, extents: Extents) -> tuple[Launch, ...]:
        form, num_requests = self.form, extents["R"]
        if num_requests == 0:
            return ()
        block = self._request_block(num_requests)
        request_blocks = -(-num_requests // block)
        launches = []
        if form.top_n:
            launches.append(Launch("select_candidates", (num_requests * form.gamma, 1)))
        if self._is_projected:
            num_rows = num_requests * form.gamma
            row_block = self._request_block(num_rows)
            grid = (-(-num_rows // row_block), -(-self._num_projected // PROJECTED_OUT))
            launches.append(Launch(f"project_hidden_{row_block}", grid, {"num_rows": num_rows}))
        for slot in range(form.gamma):
            of_slot = {"num_requests": num_requests, "slot": slot}
            if self._is_projected:
                block_r, block_out = FEATURE_BLOCK.values()
                grid = (-(-num_requests // block_r), -(-form.markov_rank // block_out))
                launches.append(Launch("feature", grid, of_slot))
            if form.top_n:
                launches.append(Launch("candidate_logits", (num_requests, self._num_tiles), {"slot": slot}))
            else:
                launches.append(Launch(f"tile_logits_{block}", (request_blocks, self._num_tiles), of_slot))
            launches.append(Launch("draw_token", (num_requests, 1), {"slot": slot}))
        if form.has_confidence_head:
            launches.append(Launch("confidence", (num_requests, form.gamma)))
        return tuple(launches)

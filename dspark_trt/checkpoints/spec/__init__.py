"""What a checkpoint is, once it has been read: frozen specifications and a way to reach its tensors.

Readers of every supported format (Hugging Face safetensors, GGUF, DeepSpec) end here, so that graph emitters and the
PyTorch reference know one form only.

Canonical tensor names (no `model.` prefix, Hugging Face layout: Linear weights are [out, in]):
    target   embed_tokens.weight, layers.{i}.input_layernorm.weight, layers.{i}.post_attention_layernorm.weight,
             layers.{i}.self_attn.{q,k,v,o}_proj.{weight,bias}, layers.{i}.self_attn.{q,k}_norm.weight,
             layers.{i}.mlp.{gate,up,down}_proj.{weight,bias}, norm.weight, lm_head.weight (absent when tied);
             Gemma 4 also layers.{i}.{pre,post}_feedforward_layernorm.weight and layers.{i}.layer_scalar [1];
             where a layer has experts: layers.{i}.mlp.gate.weight [E, D], layers.{i}.mlp.experts.gate_up.weight
             [E, 2I, D] with the rows of gate and up in turn, layers.{i}.mlp.experts.down.weight [E, D, I],
             layers.{i}.mlp.shared_expert.{gate,up,down}_proj.weight, layers.{i}.mlp.shared_expert_gate.weight [1, D]
    drafter  the same for its layers, plus fc.weight, hidden_norm.weight, markov_head.markov_w1.weight [V, r],
             markov_head.markov_w2.weight [V, r], markov_head.gate_proj.{weight,bias} (gated),
             markov_head.joint_proj.{weight,bias} (rnn), confidence_head.proj.{weight,bias},
             layers.{i}.self_attn.attention_sink_bias [N] where a layer has a sink;
             embed_tokens.weight and lm_head.weight only where they are the drafter's own; of a language model the
             names of a target; of Medusa heads.{i}.blocks.{j}.{weight,bias} and heads.{i}.lm_head.weight
"""

from dspark_trt.checkpoints.spec.decoder import (
    DecoderSpec,
    ExpertsSpec,
    Family,
    GemmaSpec,
    GenerationDefaults,
    LayerShape,
    RopeSpec,
    RopeType,
    TargetSpec,
)
from dspark_trt.checkpoints.spec.drafters import (
    FAMILY_NAMES,
    PLAIN_ATTENTION,
    SOURCES_OF_COPIES,
    BlockAttention,
    BlockDrafterSpec,
    DrafterBase,
    DrafterSpec,
    DraftSource,
    Eagle3Spec,
    IngestedIds,
    LanguageModelSpec,
    MarkovHeadType,
    MedusaSpec,
    NgramSpec,
    a_drafter,
)
from dspark_trt.checkpoints.spec.weights import (
    DrafterCheckpoint,
    TargetCheckpoint,
    TensorInfo,
    WeightStore,
)

__all__ = [
    "FAMILY_NAMES",
    "PLAIN_ATTENTION",
    "SOURCES_OF_COPIES",
    "BlockAttention",
    "BlockDrafterSpec",
    "DecoderSpec",
    "DraftSource",
    "DrafterBase",
    "DrafterCheckpoint",
    "DrafterSpec",
    "Eagle3Spec",
    "ExpertsSpec",
    "Family",
    "GemmaSpec",
    "GenerationDefaults",
    "IngestedIds",
    "LanguageModelSpec",
    "LayerShape",
    "MarkovHeadType",
    "MedusaSpec",
    "NgramSpec",
    "RopeSpec",
    "RopeType",
    "TargetCheckpoint",
    "TargetSpec",
    "TensorInfo",
    "WeightStore",
    "a_drafter",
]

"""Further configurations of dense families, for `tests/architectures/test_variants.py`.

Values replace values of the tiny configuration; ``"absent"`` removes the value of a key.
"""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
ONE_KV_HEAD: dict[str, Any] = {"num_key_value_heads": 1}
KV_HEAD_PER_HEAD: dict[str, Any] = {"num_key_value_heads": 6}
LINEAR: dict[str, Any] = {"rope_scaling": {"type": "linear", "factor": 2.0}}
BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
_GLM: dict[str, dict[str, Any]] = {
    "no biases, tied": {"attention_bias": False, "partial_rotary_factor": "absent"} | TIED | ONE_KV_HEAD,
    "partial rope, head_dim 40": {"head_dim": 40, "partial_rotary_factor": 0.2} | KV_HEAD_PER_HEAD,
    "rope on whole heads": {"partial_rotary_factor": 1.0, "rms_norm_eps": "absent", "rope_theta": "absent"},
}

DENSE_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "olmo3": {
        "biases, tied": {"attention_bias": True} | TIED | ONE_KV_HEAD,
        "rope_parameters, layer types": {
            "layer_types": [FULL, SLIDING, FULL, SLIDING],
            "rope_theta": "absent",
            "rope_scaling": "absent",
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
                SLIDING: {"rope_type": "default", "rope_theta": 30.0},
            },
        },
        "other rope base": {"rope_theta": 700.0, "rope_scaling": "absent"} | KV_HEAD_PER_HEAD,
    },
    "gemma": {
        "keys of the first checkpoints": {"hidden_act": "gelu", "hidden_activation": None} | KV_HEAD_PER_HEAD,
        "biases, untied": {"attention_bias": True, "head_dim": 24, "hidden_act": "silu"} | UNTIED,
    },
    "glm": _GLM,
    "glm4": _GLM,
    "ernie4_5": {
        "biases, untied": {"use_bias": True} | UNTIED | ONE_KV_HEAD,
        "head_dim null": {"head_dim": None, "rope_theta": "absent"} | KV_HEAD_PER_HEAD,
    },
    "seed_oss": {
        "other biases": {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True} | LINEAR,
        "tied": {"head_dim": 24, "attention_bias": "absent"} | TIED | ONE_KV_HEAD,
    },
    "exaone4": {
        "configuration of the 1.2B model": {
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": [FULL] * 4,
        }
        | TIED,
        "configuration of the 32B model": {
            "sliding_window_pattern": "LLLG",
            "layer_types": [SLIDING] * 3 + [FULL],
        }
        | LINEAR,
        "layer types": {"layer_types": [FULL, SLIDING, SLIDING, FULL], "head_dim": 16} | ONE_KV_HEAD,
    },
    "helium": {
        "biases, tied": BIASES | TIED | ONE_KV_HEAD,
        "one kv head per query head": {"rope_theta": "absent", "rms_norm_eps": "absent"} | KV_HEAD_PER_HEAD,
    },
    "arcee": {
        "biases, tied": BIASES | TIED | ONE_KV_HEAD,
        "other activation": {"hidden_act": "gelu", "head_dim": "absent"} | LINEAR,
    },
    "cohere": {
        "no norms of heads": {"use_qk_norm": False, "attention_bias": True} | KV_HEAD_PER_HEAD,
        "untied": {"logit_scale": "absent", "rope_theta": "absent"} | UNTIED | ONE_KV_HEAD,
    },
    "cohere2": {
        "layer types": {"layer_types": [FULL, FULL, SLIDING, SLIDING]} | UNTIED | ONE_KV_HEAD,
        "biases": {"attention_bias": True, "head_dim": 24, "sliding_window_pattern": "absent"} | LINEAR,
    },
    "hunyuan_v1_dense": {
        "biases, untied": {"attention_bias": True, "rope_scaling": None} | UNTIED | KV_HEAD_PER_HEAD,
        "other rope base": {"rope_scaling": None, "rope_theta": 500.0, "head_dim": 24} | ONE_KV_HEAD,
    },
    "apertus": {
        "biases, tied": {"attention_bias": True} | TIED | ONE_KV_HEAD,
        "rope_parameters": {
            "rope_scaling": "absent",
            "rope_theta": "absent",
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "head_dim": 24,
        }
        | KV_HEAD_PER_HEAD,
    },
    "ministral3": {
        "window, tied": {"sliding_window": 24} | TIED | KV_HEAD_PER_HEAD,
        "one kv head": {"head_dim": 24} | ONE_KV_HEAD,
    },
    "starcoder2": {
        "no biases, untied": {"use_bias": False, "sliding_window": None} | UNTIED | ONE_KV_HEAD,
        "other activation": {"hidden_act": "relu", "head_dim": 24} | LINEAR | KV_HEAD_PER_HEAD,
    },
    "phi": {
        "no norms of heads": {"qk_layernorm": False, "partial_rotary_factor": "absent"} | KV_HEAD_PER_HEAD,
        "tied": {"partial_rotary_factor": 1.0, "hidden_act": "gelu"} | TIED | ONE_KV_HEAD,
    },
    "stablelm": {
        "sequential blocks": {"use_parallel_residual": False, "partial_rotary_factor": 0.5} | ONE_KV_HEAD,
        "no norms, no biases": {"qk_layernorm": False, "use_qkv_bias": False} | TIED,
        "norms, sequential blocks": {"use_parallel_residual": False, "partial_rotary_factor": "absent"}
        | KV_HEAD_PER_HEAD,
    },
    "gpt_neox": {
        "sequential blocks": {"use_parallel_residual": False, "attention_bias": False},
        "rope on whole heads, tied": {"rotary_pct": 1.0, "hidden_act": "gelu_fast"} | TIED,
        "defaults": {"rotary_pct": "absent", "rotary_emb_base": 500, "hidden_act": "absent"},
    },
    "nemotron": {
        "biases, tied": BIASES | TIED | ONE_KV_HEAD,
        "defaults": {"partial_rotary_factor": "absent", "hidden_act": "absent", "head_dim": 24}
        | KV_HEAD_PER_HEAD,
    },
    "olmo": {
        "no clipping": {"clip_qkv": None, "attention_bias": True} | TIED | KV_HEAD_PER_HEAD,
        "clip_qkv 0.3": {"clip_qkv": 0.3, "head_dim": 16} | ONE_KV_HEAD,
    },
    "internlm3": {
        "dynamic rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        "no biases, tied": {"bias": False, "qkv_bias": False} | TIED | ONE_KV_HEAD,
        "head_dim null": {"head_dim": None, "bias": "absent", "qkv_bias": "absent"} | KV_HEAD_PER_HEAD,
    },
}

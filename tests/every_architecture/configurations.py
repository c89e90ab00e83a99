"""Makes the configuration of any model type small, by the names that its fields have.

All widths become the same number, and so do all numbers of heads and all sizes of a head, so that fields of different
parts that have to agree still do. A model type for which the names are not enough has a row in `SPECIAL`.
"""

from __future__ import annotations

import re
from typing import Any

from every_architecture.special import SPECIAL
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WIDTH = 64
HEADS = 4
HEAD = WIDTH // HEADS
VOCABULARY = 160
# Token ids of a configuration that are too large for this vocabulary become the last ones of it.
FIRST_SPECIAL = 120
LAYERS = 2
MOST_LAYERS = 4
IMAGE = 32

# The first expression that a whole name matches gives the largest value that the field may have.
_LIMITS: list[tuple[int, str]] = [
    (16, r"(.*_)?type_vocab_sizes?|n_langs|num_speakers|num_labels|.*_n_levels|num_feature_levels|num_stages"),
    (VOCABULARY, r".*vocab(_size)?|.*vocab_size.*|num_embeddings|num_embeds|.*vocab_offset"),
    (16, r"num_feat_extract_layers|num_channels(_out)?|in_chan(nel)?s|audio_channels|input_channels|stem_num_channels"),
    (32, r".*lowrank|.*_rank|latent_size"),
    (2, r"(.*_)?(num|n)_(k(ey_)?v(alue)?)_(attention_)?heads|num_kv_heads|num_query_groups"),
    (8, r"mamba_(n|num)_heads|n_mamba_heads|ssm_num_heads"),
    (2 * HEAD, r"qk_head_dim"),
    (HEAD, r"(.*_)?head_size|d_kv|d_head|dim_head|mamba_d_head|mamba_headdim|kv_channels|.*head_dim|.*_dim_head"),
    (HEADS, r"(.*_)?heads?"),
    (8, r"rotary_dim"),
    (16, r"ssm_state_size|state_size|mamba_d_state"),
    (IMAGE, r"crop_size|img_size|resolution|.*image_size"),
    (8, r"(.*_)?patch_size"),
    (64, r"num_position_embeddings"),
    (128, r".*(position|pos)_emb(edding)?s?|n_positions|n_ctx|.*_positions|.*max_seq_len|seq_len|model_max_length"),
    (2 * WIDTH, r"(.*_)?(intermediate|ffn|feedforward|feed_forward|mlp)_?(size|dim|hidden_size|hidden_dim)(_mlp)?"),
    (2 * WIDTH, r"d_ff|dff|dim_ff|n_inner|.*ffn_dim|dim_feedforward|.*_intermediate_size|.*_linear_units|d_inner"),
    (4, r"n_(routed_)?experts|.*num_experts|num_(local|routed)_experts|zero_expert_num"),
    (2, r"num_experts_per_token|moe_(k|topk)|top_?k(_experts)?|.*experts_per_tok|num_selected_experts"),
    (2, r"n_group|num_expert_group|topk_group|n_groups|o_groups|[kqv]_groups"),
    (8, r".*_topk|index_topk_blocks"),
    (8, r"sliding_window|attention_window|local_attention.*|.*window_size"),
    (8, r".*chunk_size|.*block_size|.*attn_chunk_length"),
    (8, r"num_(queries|query_tokens|latents|landmarks|denoising|detection_tokens|global_tokens)|.*num_latents"),
    (8, r".*n_latents|latent_query_num|two_stage_num_proposals|num_prototypes|num_prompts|prompt_length"),
    (32, r".*(codebook_size|num_codevectors_per_group|codebook_vocab_size|bins?)"),
    (4, r"num_quantizers|num_codebooks|num_code_groups|n_codebooks|num_frames|frames_per_clip"),
    (LAYERS, r"(.*_)?(n|num)_layer|encoder_layer|decoder_layer|n_hidden_layer|num_hidden_layer|(.*_)?depth"),
    (LAYERS, r".*_layers|layers|num_layers_.*|.*_blocks|num_hidden_groups"),
    (2, r".*period|.*_interval|.*_frequency|.*_pattern|layer_group_size|.*sparse_step"),
    (1, r"attn_layer_offset|expert_layer_offset|insert_layer_id|.*_replace"),
    (WIDTH, r"upsample_initial_channel|upsample_groups"),
    (8, r"num_filters"),
    (32, r".*_channels?|.*_units"),
    (16, r"num_conv_pos_embeddings"),
    (4, r"num_conv_pos_embedding_groups|num_groups"),
    (WIDTH, r"(.*_)?(hidden|d|embed|emb|embedding|model|projection|project|output|input|text|vision|latents?)_?size"),
    (WIDTH, r"d_model|d_latents|.*dim|width|.*_width|n_embd|.*_dimension|.*_dims"),
    (WIDTH, r".*hidden_size.*|.*_size_global|entity_emb_size|pooler_output_size|classifier_proj_size"),
    (WIDTH, r"prediction_head_size|.*feature_size|retrieval_vector_size"),
    (8, r"coordinate_size|shape_size"),
]
_RULES = [(limit, re.compile(pattern)) for limit, pattern in _LIMITS]
_KEPT = re.compile(
    r".*(kernel|stride|ratio|factor|scale|dilation|padding|rate|loss|coefficient|cost|weight|epsilon|_eps|temperature"
    r"|dropout|_std|theta|merge|groups_width|num_landmarks_|mask_time|mask_feature|reduction|multiplier|expand).*"
)
_WIDTHS = re.compile(r".*(hidden_sizes|embed_dims?|channels|dims?|neck_.*sizes|conv_dim|tdnn_dim|sizes|feature_dims).*")
_HEADS = re.compile(r".*heads.*")
_DEPTHS = re.compile(
    r"depths|.*depths|stage_num_blocks|blocks_per_stage|stage_numb_of_layers|block_repeats|n_attn_blocks"
)
_INDICES = re.compile(r".*(indices|indexes|layer_ids|idxs|hook_ids|_layers|layer|attention_blocks|block_index.*)")
_NUMBER_OF_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers")
_LEFT_OUT = {"id2label", "label2id", "out_features", "out_indices", "stage_names", "architectures", "dtype"}
_LEFT_OUT |= {"transformers_version", "_name_or_path", "torch_dtype"}


def small_config(model_type: str) -> PreTrainedConfig:
    """Return a small configuration of a model type.

    Raises:
        ValueError: The type needs arguments that neither the names nor `SPECIAL` tell.
    """
    return _small(CONFIG_MAPPING[model_type](), _TokenIds())


def _small(config: PreTrainedConfig, ids: _TokenIds) -> PreTrainedConfig:
    """Return a small configuration of the class of one that has the defaults."""
    layers, values = _picked_layers(config), {}
    for name, value in config.to_dict().items():
        inner = vars(config).get(name)  # some attributes are of a layer alone, and raise
        if isinstance(inner, PreTrainedConfig):
            values[name] = _small(inner, ids)
        elif name not in _LEFT_OUT:
            values[name] = _small_value(name, value, layers, ids)
    if "depths" in values and isinstance(values.get("embed_dim"), int):
        values["embed_dim"] = WIDTH // 2  # it doubles at each stage
    values |= _key_value_heads(config.to_dict(), values) | _stages(config, values)
    values |= SPECIAL.get(config.model_type, {})
    return type(config)(**values)


def _key_value_heads(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, int]:
    """Return as many heads of keys as of queries where a configuration has so by default."""
    heads = {}
    for name, value in defaults.items():
        queries = next((each for each in _queries(name) if type(defaults.get(each)) is int), None)
        if queries and type(value) is int and (value == defaults[queries] or "qk_rope_head_dim" in values):
            heads[name] = values[queries]
    return heads


def _queries(name: str) -> list[str]:
    """Return how the number of heads may be called that belongs to that of the keys."""
    if not re.search(r"(key_value|kv)_(attention_)?heads$|num_query_groups", name):
        return []
    plain = re.sub(r"(key_value_attention|key_value|kv)_heads$", "heads", name)
    return [re.sub(r"(key_value_attention|key_value|kv)_heads$", "attention_heads", name), plain, "n_head", "n_heads"]


def _stages(config: PreTrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Return which stages a backbone gives out: as many as by default, for which it may need more layers."""
    names, given = getattr(config, "stage_names", None), getattr(config, "out_features", None)
    if not names or not given:
        return {}
    name = next((layer for layer in _NUMBER_OF_LAYERS if vars(config).get(layer) == len(names) - 1), None)
    if name is None or len(given) == 1 or isinstance(values.get("layer_types"), list):
        return {} if name else {"out_features": list(given)}
    layers = max(len(given), values[name])
    return {name: layers, "out_indices": list(range(layers - len(given) + 1, layers + 1))}


class _TokenIds:
    """Gives each token id that is too large another one, the same for the same id."""

    def __init__(self) -> None:
        self.taken: dict[int, int] = {}

    def __getitem__(self, token_id: int) -> int:
        if token_id < FIRST_SPECIAL:
            return token_id
        return self.taken.setdefault(token_id, VOCABULARY - 1 - len(self.taken) % (VOCABULARY - FIRST_SPECIAL))


def _picked_layers(config: PreTrainedConfig) -> tuple[int, list[int]]:
    """Return how many layers a configuration has, and the numbers of few that are of all kinds."""
    counts = (vars(config).get(name) for name in _NUMBER_OF_LAYERS)
    count = next((value for value in counts if isinstance(value, int)), 0)
    lists = [value for name, value in config.to_dict().items() if _is_per_layer(name, value, count)]
    kinds: dict[tuple[Any, ...], int] = {}
    for number, kind in enumerate(zip(*lists, strict=True)):
        kinds.setdefault(kind, number)
    picked = list(kinds.values())[:MOST_LAYERS]
    others = [number for number in range(count) if number not in picked]
    return count, sorted(picked + others[: max(0, LAYERS - len(picked))])


def _is_per_layer(name: str, value: Any, count: int) -> bool:
    """Return whether a list says of each layer of which kind it is."""
    is_list = isinstance(value, list) and len(value) == count > 4
    return is_list and all(isinstance(each, str | int) for each in value) and not _WIDTHS.fullmatch(name)


def _small_value(name: str, value: Any, layers: tuple[int, list[int]], ids: _TokenIds) -> Any:
    """Return a small value for a field."""
    count, picked = layers
    if re.search(r"_token_(id|index)s?$|_token_id|^(bos|eos|pad)_|_(id|index)$", name):
        return _new_ids(value, ids)
    if name == "per_layer_config":
        return _small_layers(value, layers, ids)
    if value is None:
        return {"head_dim": HEAD, "num_experts_per_tok": 2}.get(name)
    if isinstance(value, dict):
        return _small_rope(value) if name.startswith("rope") else value
    if isinstance(value, list):
        return _small_list(name, value, layers)
    if type(value) is not int or value < 0:
        return value
    if name in _NUMBER_OF_LAYERS and value == count:
        return len(picked)
    if _KEPT.fullmatch(name):
        return value
    limit = next((limit for limit, pattern in _RULES if pattern.fullmatch(name)), value)
    return min(value, limit)


def _small_layers(
    values: dict[str, dict[str, Any]], layers: tuple[int, list[int]], ids: _TokenIds
) -> dict[int, dict[str, Any]]:
    """Return small values for the fields in which single layers differ, of the layers that are taken."""
    small = {}
    for number, fields in values.items():
        if int(number) in layers[1]:
            those = {name: _small_value(name, value, layers, ids) for name, value in fields.items()}
            small[layers[1].index(int(number))] = those | _key_value_heads(fields, those)
    return small


def _new_ids(value: Any, ids: _TokenIds) -> Any:
    if isinstance(value, list):
        return [_new_ids(each, ids) for each in value]
    return ids[value] if type(value) is int else value


def _small_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return parameters of rotary positions for the small heads; those of several kinds of layers are nested."""
    small = {name: _small_rope(value) if isinstance(value, dict) else value for name, value in rope.items()}
    half = int(HEAD * small.get("partial_rotary_factor", 1)) // 2
    for name, value in small.items():
        if name == "mrope_section":
            small[name] = _sections(half, len(value))
        elif isinstance(value, list):
            small[name] = value[:half]
    return small


def _sections(total: int, parts: int) -> list[int]:
    return [total // parts + (part >= parts - total % parts) for part in range(parts)]


def _small_list(name: str, value: list[Any], layers: tuple[int, list[int]]) -> list[Any]:
    """Return a list of the same length with small values, or the entries of the layers that are taken."""
    count, picked = layers
    of_layers = len(value) == count > 4 and not _INDICES.fullmatch(name)
    if of_layers or name in ("layer_types", "mlp_layer_types") or _is_per_layer(name, value, count):
        return [value[number] for number in picked if number < len(value)]
    if any(type(each) is not int for each in value) or _KEPT.fullmatch(name):
        return value
    if _DEPTHS.fullmatch(name):
        return [1] * len(value)
    if _HEADS.fullmatch(name):
        return [1 << min(each, HEADS).bit_length() - 1 for each in value]  # a power of two, which divides a width
    if _WIDTHS.fullmatch(name):
        return [min(each, WIDTH) for each in value]
    if _INDICES.fullmatch(name) and picked and max(value, default=0) > 1:
        return sorted({min(each, len(picked) - 1) for each in value})
    return value

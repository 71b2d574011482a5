"""A config.json as transformers saves it, with the keys of the official one."""
from collections.abc import Mapping

RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def official_config(config: Mapping[str, object]) -> dict[str, object]:
    """The same model under official keys; what is official already stays as it is.

    transformers lists a type for each layer where the official file has ratios and a count of hash-routed layers, and
    gives rope parameters for both kinds of layers.
    """
    made = dict(config)
    kinds, routing, rope = (config.get(key) for key in ("layer_types", "mlp_layer_types", "rope_parameters"))
    if "compress_ratios" not in made and isinstance(kinds, list):
        rates = config.get("compress_rates")
        known = RATIOS | (dict(rates) if isinstance(rates, Mapping) else {})
        made["compress_ratios"] = [known.get(kind) if isinstance(kind, str) else None for kind in kinds]
    if "num_hash_layers" not in made and isinstance(routing, list):
        made["num_hash_layers"] = routing.count("hash_moe")
    if "rope_scaling" not in made and isinstance(rope, Mapping):
        made |= _rope(rope)
    return made


def _rope(rope: Mapping[str, object]) -> dict[str, object]:
    plain, stretched = rope.get("main"), rope.get("compress")
    found: dict[str, object] = {}
    if isinstance(plain, Mapping) and "rope_theta" in plain:
        found["rope_theta"] = plain["rope_theta"]
    if isinstance(stretched, Mapping):
        found["compress_rope_theta"] = stretched.get("rope_theta")
        found["rope_scaling"] = {"type": stretched.get("rope_type")} | {
            key: stretched[key] for key in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
            if key in stretched}
    return found

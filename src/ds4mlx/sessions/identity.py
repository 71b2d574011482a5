"""Which model a saved state belongs to, and the names of files that follow from it.

A head is named by its key, so that a request finds it by hashing its own beginning. A segment is named by all tokens
up to its end, so that conversations with equal beginnings share it.
"""
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ds4mlx.sessions.integrity import Corrupt

SPAN_TOKENS = 2048  # tokens of one segment

HEAD_SUFFIX, ALIAS_SUFFIX, SEGMENT_SUFFIX = ".kvm", ".kva", ".kvs"


@dataclass(frozen=True, slots=True)
class Identity:
    """Fingerprints are lowercase hex. Two states are interchangeable when all but `weights_fp` are equal."""
    base_fp: str        # the checkpoint that was quantised; weights_fp if the model file does not say
    weights_fp: str     # the tensors themselves
    tokenizer_fp: str   # how text becomes ids
    layout_fp: str      # names, shapes and dtypes of a state
    engine_abi: int     # meaning of a state, counted up when it changes
    quant_bits: int     # of the routed experts; 16 is unquantised


@dataclass(frozen=True, slots=True)
class FileName:
    """A cache file's name, taken apart. `stem`: SHA-1 of the key, or the 32 hex digits of a segment."""
    kind: Literal["head", "alias", "segment"]
    stem: str
    base8: str = ""       # of a head or an alias: first digits of base_fp
    quant_bits: int = 0


def head_name(key: bytes, identity: Identity) -> str:
    """`<sha1 of the key>-<base8>-q<bits>.kvm`."""
    return f"{hashlib.sha1(key).hexdigest()}-{identity.base_fp[:8]}-q{identity.quant_bits}{HEAD_SUFFIX}"


def alias_name(key: bytes, identity: Identity) -> str:
    """`<sha1 of the key>-<base8>-q<bits>.kva`."""
    return head_name(key, identity).removesuffix(HEAD_SUFFIX) + ALIAS_SUFFIX


def segment_file(name: str) -> str:
    """The file of a segment that `chain_hashes` named."""
    return name + SEGMENT_SUFFIX


def parse_name(name: str) -> FileName | None:
    """What a file in the directory is by its name; None for any other file."""
    if found := _KEYED.fullmatch(name):
        return FileName("head" if found[4] == "m" else "alias", found[1], found[2], int(found[3]))
    if found := _SEGMENT.fullmatch(name):
        return FileName("segment", found[1])
    return None


def known_name(name: str) -> FileName:
    """What a file is of which it is known to be one of ours."""
    found = parse_name(name)
    assert found is not None, name
    return found


def chain_hashes(identity: Identity, tokens: Sequence[int] | np.ndarray) -> tuple[str, ...]:
    """Name, 32 hex digits, of the segment of every full span of `tokens`.

    h[0] = SHA-256 of base_fp, tokenizer_fp, layout_fp, engine_abi and quant_bits as lines of text;
    h[k+1] = SHA-256(h[k], ids of span k as little-endian u32). A name is the beginning of h[k+1].
    """
    ids = np.asarray(tokens, "<u4")
    lines = (identity.base_fp, identity.tokenizer_fp, identity.layout_fp, identity.engine_abi, identity.quant_bits)
    link, names = hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).digest(), []
    for start in range(0, len(ids) - SPAN_TOKENS + 1, SPAN_TOKENS):
        link = hashlib.sha256(link + ids[start:start + SPAN_TOKENS].tobytes()).digest()
        names.append(link.hex()[:32])
    return tuple(names)


def identity_metadata(identity: Identity) -> dict[str, str]:
    """The fingerprints and the ABI as a container's metadata holds them; the bits stand elsewhere in a file."""
    return {"base_fp": identity.base_fp, "weights_fp": identity.weights_fp, "tokenizer_fp": identity.tokenizer_fp,
            "layout_fp": identity.layout_fp, "engine_abi": str(identity.engine_abi)}


def parse_identity(metadata: Mapping[str, str], quant_bits: int) -> Identity:
    """The inverse. Raises Corrupt."""
    prints = [metadata.get(name, "") for name in ("base_fp", "weights_fp", "tokenizer_fp", "layout_fp")]
    if not all(_FINGERPRINT.fullmatch(value) for value in prints):
        raise Corrupt("the payload does not say which model it is of; the file will be set aside")
    base, weights, tokenizer, layout = prints
    return Identity(base, weights, tokenizer, layout, metadata_int(metadata, "engine_abi"), quant_bits)


def metadata_int(metadata: Mapping[str, str], key: str) -> int:
    """A number below 2^32 that the metadata holds as decimal text. Raises Corrupt."""
    value = metadata.get(key, "")
    if not _DECIMAL.fullmatch(value) or int(value) >= 1 << 32:
        raise Corrupt(f"the payload's {key} is {value[:20]!a}, need a number; the file will be set aside")
    return int(value)


_FINGERPRINT = re.compile(r"[0-9a-f]{8,128}")
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,9}")
_KEYED = re.compile(r"([0-9a-f]{40})-([0-9a-f]{8})-q([1-9][0-9]{0,2})\.kv([ma])")
_SEGMENT = re.compile(r"([0-9a-f]{32})\.kvs")

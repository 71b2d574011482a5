"""How kernels of a few tokens are launched: what they are compiled for, how work is shared out, and the shared memory
that it takes. Without CuPy: both engines launch them alike."""
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Self

from ds4mlx.cuda_port.source import Defines

LANES = 32
WARPS = 16                  # groups of lanes, of a block
BLOCK = 256                 # activations of one scale
BLOCK_OWN_BYTES = 1024      # of shared memory, that each block takes for itself

TILE_ROWS = 16              # of a matrix
SLICE_COLUMNS, SLICE_BYTES = 128, 32 * 80  # of a tile, for a group of lanes
REGISTERS = 64              # of a lane, for the vectors of dense_batch.cuh
STAGED_BYTES = 32 * 1024    # of vectors that it encodes at a time, or of two sets of its partial sums
# Instructions of a group of lanes, counted in machine code: for a slice, and for each four vectors; for the rest of a
# round of tiles. A quarter of a multiprocessor issues so many a cycle. Then cycles for each column of each vector, of
# which most is reading them from the second cache, and for adding up what a cluster has found.
SLICE_INSTRUCTIONS = {"Q8_0": (80, 32), "F16": (70, 6)}
ROUND_INSTRUCTIONS = 150
ISSUED = 0.45
CYCLES_ENCODING, CYCLES_ADDING = 0.2, 1000
BATCH_DEPTHS = {8: (4, 3, 2), 16: (3, 2)}   # by vectors; with more of 16 on their way a launch takes longer, measured

PIECE_WEIGHTS = {"IQ2_XXS": 64, "Q2_K": 64, "Q4_K": 32, "MXFP4": 32}  # of an expert's row, for one lane (pieces.cuh)
TEAM = 8                    # groups of lanes that share rows of experts
EXPERT_TOKENS = 4           # at a time, at most
GATE_UP_ROWS, DOWN_ROWS = 8, 16     # of a team
CODEBOOK_BYTES = 32 * 1024  # of IQ2_XXS, for each lane its own
WIDE_END = 128 * 1024       # of a wide one in shared memory: its address ends in 16 zeros

STEP_TOKENS = 16            # of expert_step.cuh, at most
STEP_LEAST_BYTES = 96 * 1024  # of shared memory, for one token
STEP_PARTS = 8              # of its gate and up, of a group of lanes
GATE_UP_WARPS, GATE_UP_DEPTH = 16, 2    # its groups of lanes, and tiles of each matrix on their way to each
TABLES_BYTES = (256 + 128) * LANES * 4      # the codebook of IQ2_XXS and its signs, for each lane its own
STEP_TABLES_BYTES = 2 * 256 * LANES * 4     # the same for it, signs by whole bytes
OCTETS_BYTES = 128          # of zeros
STAGE_BYTES = 2 * 1344 + 2 * 256 + 16 * 8   # of a pair on its way to `down`, for a group of lanes

CHUNK_FORMS = (64, 64, 16), (16, 64, 4), (32, 32, 4), (16, 32, 2)   # attention: heads, keys of a tile, groups of lanes
STEP_HEADS = 16             # of a block; a token's keys are split over as many blocks as a cluster can have
# Keys of a tile, by groups of lanes (16 where a multiprocessor has one block): of those that may hold a block's whole
# slice, then of those that longer ones are cut into. 320 take 32.1 us in tiles of 64, 33.4 of 128, 34.5 of 80.
STEP_KEYS = {8: ((32, 80), (80,)), 16: ((32, 64, 80, 128), (128, 64))}
# Slices of a token's keys, where all blocks then take no more than that part of the multiprocessors, one each: clusters
# of 8 and of 4 do not fit them all. What is more than the last shares them by twos.
SLICES = (8, 0.88), (4, 0.9), (2, 1)

MOST_CLUSTER = 8            # blocks
MOST_PAIRS = 128            # of channels of each stream, of a hyper-connection's block


@dataclass(frozen=True, slots=True)
class Limits:
    """What a card has: multiprocessors, and bytes of shared memory of one of them and for one block."""
    processors: int
    of_processor_bytes: int
    of_block_bytes: int


def can_be_arranged(kind: str, shape: tuple[int, ...]) -> bool:
    """Whether there are kernels for a matrix, or a stack of them, whose rows have their codes before their scales."""
    rows, width = shape[-2:]
    if len(shape) == 2:
        return kind == "Q8_0" and width % BLOCK == 0 and rows % TILE_ROWS == 0
    if kind not in PIECE_WEIGHTS:
        return False
    pieces = width // PIECE_WEIGHTS[kind]
    segments = pieces // LANES
    return (width % BLOCK == 0 and pieces % LANES == 0 and 0 < segments <= TEAM and TEAM % segments == 0
            and rows % TILE_ROWS == 0)


def can_be_tiled(gate: tuple[str, tuple[int, ...]], up: tuple[str, tuple[int, ...]],
                 down: tuple[str, tuple[int, ...]], limits: "Limits") -> bool:
    """Whether expert_step.cuh multiplies these stacks, each a type and a shape [E, rows, width], and has room."""
    width, rows = gate[1][-1], gate[1][-2]
    return (limits.of_block_bytes >= STEP_LEAST_BYTES and (gate[0], up[0], down[0]) == ("IQ2_XXS", "IQ2_XXS", "Q2_K")
            and (width == 2048 or width % 4096 == 0) and width <= 8192 and rows in (1024, 2048, 4096))


@dataclass(frozen=True, slots=True)
class DenseForm:
    """How dense_matmul.cu's `decode` is launched."""
    defines: Defines
    vectors: int        # at most
    together: int       # tiles that a block works on at a time
    shared_bytes: int
    blocks: int         # of a multiprocessor

    @classmethod
    @cache
    def of(cls, k: int, tokens: int, kinds: frozenset[str], limits: Limits) -> Self:
        """For as many of the tokens as shared memory holds at a time."""
        vectors = 1 << (tokens - 1).bit_length()
        while vectors:
            for depth, phases, blocks in ((2, 1, 2), (3, 1, 1), *((n, 1 << i, 1) for n in (2, 1) for i in range(4))):
                form = cls._with(k, vectors, kinds, depth, phases, blocks)
                if form.fits(k, phases, limits):
                    return form
            vectors //= 2
        raise AssertionError(f"no room for a vector of {k}")

    @classmethod
    def _with(cls, k: int, vectors: int, kinds: frozenset[str], depth: int, phases: int, blocks: int) -> Self:
        q8, f16, rounds, part = "Q8_0" in kinds, "F16" in kinds, max(1, 4 // vectors), k // phases
        planes = vectors * (q8 * 2 * (part + 64) + f16 * 2 * (2 * part + 64) + part // BLOCK * 4)
        shared = depth * WARPS * SLICE_BYTES + planes + 2 * rounds * WARPS * vectors * TILE_ROWS * 4
        defines = (("PLAIN", 0), ("K", k), ("VECTORS", vectors), ("HAS_Q8", int(q8)), ("HAS_F16", int(f16)),
                   ("PHASES", phases), ("DEPTH", depth), ("ROUNDS", rounds))
        return cls(defines, vectors, WARPS // max(1, min(part // SLICE_COLUMNS, WARPS)), shared, blocks)

    def fits(self, k: int, phases: int, limits: Limits) -> bool:
        few = self.blocks == 1 or self.vectors <= 8  # registers
        return (few and k % (phases * BLOCK) == 0 and self.shared_bytes <= limits.of_block_bytes
                and self.blocks * (self.shared_bytes + BLOCK_OWN_BYTES) <= limits.of_processor_bytes)

    def grid(self, tiles: int, groups: int, limits: Limits) -> tuple[int, int]:
        """Blocks, for so many tiles of each group of rows."""
        return min(-(-tiles // self.together), max(1, self.blocks * limits.processors // groups)), groups


@dataclass(frozen=True, slots=True)
class BatchForm:
    """How dense_batch.cuh is launched."""
    defines: Defines
    shares: int             # blocks of a cluster
    clusters: int
    bytes_clusters: int     # that have Q8_0
    shared_bytes: int
    cycles: float           # that it should take

    @classmethod
    @cache
    def of(cls, k: int, tokens: int, tiles: tuple[int, int], groups: int, limits: Limits,
           clusters: tuple[int, ...] = ()) -> "Self | None":
        """The fastest for so many tiles of Q8_0 and of F16 of each group of rows, None where the card has too little
        shared memory. clusters: how many of 2, of 4 ... blocks, one to a multiprocessor, run at once."""
        running = limits.processors, *clusters
        forms = (cls.sharing(shares, k, 8 if tokens <= 8 else 16, tiles, max(1, most // groups), limits)
                 for shares, most in zip((1, 2, 4, 8), running, strict=False))
        return min(filter(None, forms), key=lambda form: form.cycles, default=None)

    @classmethod
    def sharing(cls, shares: int, k: int, vectors: int, tiles: tuple[int, int], most: int,
                limits: Limits) -> "Self | None":
        """With clusters of so many blocks, `most` of them at once."""
        part, (q8, f16) = k // shares, tiles
        if k % (shares * BLOCK) or q8 and f16 and most < 2:
            return None
        kinds = [_Share.of(part, vectors, kind) for kind, n in zip(("Q8_0", "F16"), tiles) if n]
        if any(kind.registers > REGISTERS or 4 * kind.of_vector > STAGED_BYTES for kind in kinds):
            return None
        rounds = [-(-n // kind.together) for n, kind in zip(filter(None, tiles), kinds)]    # of one block
        bytes_clusters, clusters = _balanced(rounds, kinds, most) if q8 and f16 else (0, min(most, rounds[0]))
        if not f16:
            bytes_clusters = clusters
        turns = [-(-n // m) for n, m in zip(rounds, filter(None, (bytes_clusters, clusters - bytes_clusters)))]
        totals = -(-max(n * kind.together for n, kind in zip(turns, kinds)) // 8) * 8 if shares > 1 else 0
        rest = STAGED_BYTES + (part // BLOCK + totals * TILE_ROWS) * vectors * 4
        depth = next((n for n in BATCH_DEPTHS[vectors] if WARPS * n * SLICE_BYTES + rest <= limits.of_block_bytes), 0)
        if not depth:
            return None
        defines = (("PLAIN", 0), ("BATCH", 1), ("K", k), ("VECTORS", vectors), ("HAS_Q8", int(q8 > 0)),
                   ("HAS_F16", int(f16 > 0)), ("SHARES", shares), ("TOTALS", totals), ("DEPTH", depth),
                   ("STAGED_BYTES", STAGED_BYTES))
        cycles = (max(n * kind.cycles for n, kind in zip(turns, kinds)) + CYCLES_ENCODING * vectors * part
                  + CYCLES_ADDING * (shares > 1))
        return cls(defines, shares, clusters, bytes_clusters, WARPS * depth * SLICE_BYTES + rest, cycles)


@dataclass(frozen=True, slots=True)
class _Share:
    """How a block of dense_batch.cuh shares its columns out (Shape), and cycles of a round."""
    together: int
    registers: int
    of_vector: int
    cycles: float

    @classmethod
    def of(cls, part: int, vectors: int, kind: str) -> Self:
        halves = kind == "F16"
        least = 128 if halves and vectors > 8 else BLOCK
        split = min(part // least, WARPS)
        parts = -(-(part // least) // split) * least // (64 if halves else SLICE_COLUMNS)
        slice_ = SLICE_INSTRUCTIONS[kind][0] + SLICE_INSTRUCTIONS[kind][1] * vectors / 4
        return cls(WARPS // split, parts * vectors // 4 * 8, part * (4 if halves else 2),
                   WARPS / 4 * (parts * slice_ + ROUND_INSTRUCTIONS) / ISSUED)


def _balanced(rounds: list[int], kinds: list[_Share], most: int) -> tuple[int, int]:
    """Clusters for Q8_0, and for both, that end soonest."""
    def ends(n: int) -> float:
        return max(-(-rounds[0] // n) * kinds[0].cycles, -(-rounds[1] // (most - n)) * kinds[1].cycles)
    n = min(range(1, most), key=ends)
    return min(n, rounds[0]), min(n, rounds[0]) + min(most - n, rounds[1])


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """How expert_rows.cuh's kernels are launched."""
    defines: Defines
    shared_bytes: int
    rows: int           # of a block

    @classmethod
    def gate_up(cls, kind: str, width: int, tokens: int, slots: int, limits: Limits) -> Self:
        segments = width // PIECE_WEIGHTS[kind] // LANES
        sums = slots * GATE_UP_ROWS * 2 * segments + TEAM * GATE_UP_ROWS * 2
        return cls._of(kind, width, tokens, 1, slots, sums, 2 * GATE_UP_ROWS, limits)

    @classmethod
    def down(cls, kind: str, width: int, tokens: int, slots: int, limits: Limits) -> Self:
        segments = width // PIECE_WEIGHTS[kind] // LANES
        sums = DOWN_ROWS * max(segments, 2) + TEAM * DOWN_ROWS
        return cls._of(kind, width, tokens, slots, slots, sums, 2 * DOWN_ROWS, limits)

    @classmethod
    @cache
    def _of(cls, kind: str, width: int, tokens: int, routed: int, slots: int, sums: int, rows: int,
            limits: Limits) -> Self:
        """For as many tokens at a time as shared memory holds. Of a token: `routed` vectors for the routed experts
        beside the shared one's, `slots` numbers of experts, `sums` partial results of a team."""
        most = min(1 << (tokens - 1).bit_length(), EXPERT_TOKENS)
        of_block = limits.of_block_bytes
        codebook, wide = kind == "IQ2_XXS", kind == "IQ2_XXS" and WIDE_END < of_block
        fields = width // 16 * (kind in ("Q2_K", "Q4_K"))
        while most:
            scales = most * (1 if routed == 1 else routed + 1) * (width // BLOCK)
            numbers = 2 * most * sums + scales + -(-most * slots // 4) * 4 + most * routed * fields
            front, planes = 4 * numbers + most * 2 * (width + 64), most * routed * 2 * width
            if wide and front > WIDE_END // 2 - BLOCK_OWN_BYTES:
                bytes_ = of_block + 1
            else:
                bytes_ = planes + (WIDE_END if wide else front + codebook * CODEBOOK_BYTES)
            if bytes_ <= of_block:
                return cls((("MOST", most), ("WIDE_CODEBOOK", int(wide))), bytes_, rows)
            most //= 2
        raise AssertionError(f"no room for a token's vectors of {width}")

    def grid(self, rows: int, limits: Limits) -> int:
        """Blocks, for matrices of so many rows."""
        return min(-(-rows // self.rows), limits.processors)


@dataclass(frozen=True, slots=True)
class StepForm:
    """How expert_step.cuh's kernels are launched."""
    defines: Defines
    shared_bytes: int
    tokens: int         # at most
    threads: int

    @classmethod
    @cache
    def gate_up(cls, width: int, tokens: int, slots: int, limits: Limits) -> Self:
        warps, supers = GATE_UP_WARPS, width // BLOCK
        team = next(n for n in ((8, 4) if tokens <= 2 else (4,)) if supers % (2 * n) == 0)

        def bytes_of(most: int, depth: int) -> int:
            partial = STEP_PARTS * warps * LANES * 4
            return (STEP_TABLES_BYTES + partial + most * supers * 4 + most * slots * 16 + -(-most * slots // 4) * 16
                    + most * 2 * (width + 64))
        return cls._largest(tokens, (GATE_UP_DEPTH,), bytes_of, limits, (("WARPS", warps), ("TEAM", team)), warps)

    @classmethod
    @cache
    def down(cls, tokens: int, slots: int, limits: Limits) -> Self:
        def bytes_of(most: int, depth: int) -> int:
            return WARPS * (depth * STAGE_BYTES + most * (LANES + TILE_ROWS) * 4) + OCTETS_BYTES + most * slots * 4
        return cls._largest(tokens, (3, 2, 1) if tokens > 1 else (2, 1), bytes_of, limits, (), WARPS)

    @classmethod
    def _largest(cls, tokens: int, depths: tuple[int, ...], bytes_of: Callable[[int, int], int], limits: Limits,
                 defines: Defines, warps: int) -> Self:
        """For as many of the tokens as shared memory holds, and then the depth."""
        most = 1 << (min(tokens, STEP_TOKENS) - 1).bit_length()
        while most:
            for depth in depths:
                if bytes_of(most, depth) <= limits.of_block_bytes:
                    return cls((("MOST", most), ("DEPTH", depth), *defines), bytes_of(most, depth), most,
                               warps * LANES)
            most //= 2
        raise AssertionError("no room for a token of expert_step.cuh")


@dataclass(frozen=True, slots=True)
class AttendForm:
    """How attend.cu's `attend` is launched: a block has some heads of a token, of a step also a slice of its keys."""
    defines: Defines
    shared_bytes: int
    heads: int
    threads: int
    slices: int
    blocks: int         # of a multiprocessor

    @classmethod
    @cache
    def chunk(cls, heads: int, channels: int, row_bytes: int, limits: Limits) -> "Self | None":
        """None where the card has too little shared memory for it."""
        for own, keys, groups in CHUNK_FORMS:
            shared = (2 * (keys + own) * (channels + 8) + 4 * own * (keys + 4) + 2 * own * (keys + 8) + 12 * own
                      + keys * row_bytes)
            whole = (own == min(form[0] for form in CHUNK_FORMS) or heads % own == 0) and channels % (16 * groups) == 0
            if whole and shared <= limits.of_block_bytes:
                defines = ("STEP", 0), ("HEADS", own), ("KEYS", keys), ("GROUPS", groups)
                return cls(defines, shared, own, LANES * groups, 1, 1)
        return None

    @classmethod
    @cache
    def step(cls, heads: int, channels: int, tokens: int, keys: int, clustered: bool, limits: Limits) -> Self:
        """keys: of a token, at most. clustered: the blocks of a token's slices put their sums together themselves."""
        blocks = -(-heads // STEP_HEADS) * tokens
        slices = next((n for n, part in SLICES if n * blocks <= part * limits.processors), SLICES[-1][0])
        together = 1 if slices * blocks <= limits.processors else 2
        groups = 16 if together == 1 and channels % 256 == 0 else 8
        whole, parts = STEP_KEYS[groups]
        own = -(-keys // slices)
        least, tile = whole[0], next((n for n in whole if n >= own), min(parts, key=lambda n: -own % n))
        for tile, together in (tile, together), (least, together), (least, 1):
            shared = (2 * tile * (channels + 8) + 2 * STEP_HEADS * (tile + 8) + 12 * STEP_HEADS + 8 * tile
                      + max(2 * STEP_HEADS * (channels + 8), 16 * STEP_HEADS * (tile + 4))
                      + 4 * STEP_HEADS * channels * (clustered and together == 1))
            if shared <= limits.of_block_bytes and together * (shared + BLOCK_OWN_BYTES) <= limits.of_processor_bytes:
                defines = (("STEP", 1), ("KEYS", tile), ("GROUPS", groups), ("CLUSTERED", int(clustered)),
                           ("SLICES", slices), ("BLOCKS", together))
                return cls(defines, shared, STEP_HEADS, LANES * groups, slices, together)
        raise AssertionError(f"no room for {least} keys of {channels} channels")


def hyper_shares(D: int, most_blocks: int) -> tuple[int, int]:
    """Blocks that share a token's channels, and pairs of them that a block takes at a time, a thread each.

    Raises ValueError for channels that cannot be dealt out so.
    """
    shares = [(blocks, pairs) for blocks in range(most_blocks, 0, -1) for pairs in range(MOST_PAIRS, 0, -LANES)
              if D % (2 * pairs * blocks) == 0]
    if not shares:
        raise ValueError(f"hyper_mix: {D} channels, needed a multiple of {2 * LANES}")
    return max(shares, key=lambda share: share[0] * share[1])

"""What a session of `ds.load(...)`, which taps nothing, adds to the engine's decoding.

    python tests/bench/session_speed.py [MODEL] [ROUNDS]

64 tokens after a prompt, read as text: the share of the time that is spent outside Engine.decode, of each round. The
two are measured in one run, so that what else the machine does slows both down. Then the plain engine loop beside it,
by turns, best round each.
"""
import sys
from time import perf_counter

import ds4mlx as ds
from ds4mlx.api.model import Model

TOKENS, PROMPT = 64, "The river begins in the hills and"


def greedy(model: Model) -> ds.Sampling:
    """That never ends by itself."""
    return ds.Sampling(temperature=0, banned=frozenset({model.tokenizer.eos}))


def engine_s(model: Model, ids: list[int]) -> float:
    state = model.engine.open(len(ids) + TOKENS)
    model.engine.prefill(state, ids)
    sampling, began, token, generated = greedy(model), perf_counter(), None, []
    for _ in range(TOKENS):
        ((step,),) = model.engine.decode([ds.Row(state, sampling, token, generated)])
        token = step.token
        generated.append(token)
    seconds = perf_counter() - began
    state.close()
    return seconds


def session_s(model: Model, ids: list[int]) -> tuple[float, float]:
    """All of it, and the part inside the engine."""
    inside, decode = 0.0, model.engine.decode

    def timed(rows):
        nonlocal inside
        began = perf_counter()
        try:
            return decode(rows)
        finally:
            inside += perf_counter() - began

    with model.session(len(ids) + TOKENS) as session:
        session.read(ids)
        answer = session.complete(max_tokens=TOKENS, sampling=greedy(model))
        model.engine.decode = timed
        began = perf_counter()
        "".join(answer)
        seconds = perf_counter() - began
        del model.engine.decode
        assert len(answer.tokens) == TOKENS
        return seconds, inside


def main() -> None:
    model = ds.load(sys.argv[1] if len(sys.argv) > 1 else "tiny", ds.Settings(ctx=512))
    ids = [model.tokenizer.bos, *model.tokenizer.encode_literal(PROMPT)]
    engine, session, outside = [], [], []
    for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 12):
        engine.append(engine_s(model, ids))
        seconds, inside = session_s(model, ids)
        session.append(seconds)
        outside.append(100 * (1 - inside / seconds))
    print(f"outside the engine: {sorted(outside)[len(outside) // 2]:.2f} % of a session's time, median of "
          f"{len(outside)}; best rounds: engine {TOKENS / min(engine):.1f} tok/s, session {TOKENS / min(session):.1f}")


if __name__ == "__main__":
    main()

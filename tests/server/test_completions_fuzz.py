"""Requests that mean nothing: POST /v1/completions answers or says what is wrong, and never breaks."""
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FIELDS = ("prompt", "model", "max_tokens", "logprobs", "stop", "echo", "suffix", "n", "best_of", "raw",
          "stream_options", "thinking", "reasoning_effort", "chat_template_kwargs", "temperature",
          "top_p", "top_k", "min_p", "seed",
          "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "user", "anything")
numbers = st.integers() | st.integers(-3, 300) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(codec=None), max_size=8) | st.sampled_from(["", "</think>", "<｜User｜>", "\ud800", "none"])
values = st.recursive(st.none() | st.booleans() | numbers | texts, lambda inner: st.lists(inner, max_size=3)
                      | st.dictionaries(st.sampled_from(["type", "0", "300", "include_usage"]), inner, max_size=2),
                      max_leaves=5)
prompts = texts | st.lists(st.integers(0, 270), min_size=1, max_size=8) | values


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=4), prompts, st.booleans())
def test_any_value_of_any_field_is_answered_or_refused(server, fields, prompt, stream):
    body = {"max_tokens": 2, **fields, "prompt": prompt, "stream": stream}
    answer = server.post("/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"})
    if answer.status_code == 200:
        assert answer.text.endswith("data: [DONE]\n\n") if stream else answer.json()["choices"][0]["finish_reason"]
    else:
        assert 400 <= answer.status_code < 500 and answer.json()["error"]["message"], body
    assert '"server_error"' not in answer.text, body

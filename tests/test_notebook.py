import mlx.core as mx
import pytest

from ds4mlx.notebook import for_mlx_lm

mlx_lm = pytest.importorskip("mlx_lm")


@pytest.fixture(scope="module")
def pair(tiny_path):
    return for_mlx_lm(tiny_path)


def test_the_chat_template_is_the_server_s_prompt(pair):
    _, tokenizer = pair
    messages = [{"role": "user", "content": "Hi</think>"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<｜begin▁of▁sentence｜><｜User｜>Hi</think><｜Assistant｜><think>"
    assert tokenizer.decode(tokenizer.apply_chat_template(messages)) == text
    assert tokenizer.apply_chat_template(messages).count(tokenizer.get_vocab()["</think>"]) == 0


def test_mlx_lm_generates_what_the_model_says(pair):
    model, tokenizer = pair
    prompt = tokenizer.encode("Hello world")
    answer = [r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=6)]
    cache, ids = model.make_cache(), prompt
    for token in answer:
        logits = model(mx.array([ids]), cache)[0, -1]
        assert logits.argmax().item() == token
        ids = [token]


def test_mlx_lm_samplers_and_chunked_prefill_work_on_it(pair):
    from mlx_lm.sample_utils import make_sampler
    model, tokenizer = pair
    text = [r.text for r in mlx_lm.stream_generate(model, tokenizer, "word " * 40, max_tokens=4, prefill_step_size=16,
                                                   sampler=make_sampler(temp=0.7, top_p=0.9))]
    assert 1 <= len(text) <= 5


def test_a_built_in_model_goes_by_its_name(pair):
    model, _ = for_mlx_lm("noise")
    tokens = mx.array([[3, 1, 4, 1, 5]])
    assert mx.array_equal(model(tokens), pair[0](tokens))

"""GET /v1/models and /v1/models/{id}: one card for OpenAI's and Anthropic's clients."""
import openai
import pytest


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-chat", "deepseek-reasoner", "deepseek-v4-pro",
                                  "my/own"])
def test_a_model_is_found_by_each_of_its_names(serve, name):
    card = serve(settings={"served_model_name": ("my/own",)}).client.get(f"/v1/models/{name}").json()
    assert (card["id"], card["object"], card["owned_by"], card["type"]) == (name, "model", "ds4mlx", "model")


@pytest.mark.parametrize("tokens, most", [(100, 100), (100_000, 4096)])
def test_a_card_tells_the_limits(serve, tokens, most):
    card = serve(settings={"tokens": tokens}).client.get("/v1/models/deepseek-v4-flash").json()
    assert card["context_length"] == card["top_provider"]["context_length"] == 4096
    assert card["top_provider"]["max_completion_tokens"] == most
    assert {"tools", "max_tokens", "reasoning_effort", "stream"} <= set(card["supported_parameters"])


def test_a_listed_model_is_the_one_that_is_found(server):
    listed = server.client.get("/v1/models").json()["data"]
    assert [server.client.get(f"/v1/models/{card['id']}").json() for card in listed] == listed


def test_a_card_has_what_an_anthropic_client_reads(server):
    card = server.client.get("/v1/models/deepseek-v4-flash", headers={"anthropic-version": "2023-06-01"}).json()
    assert card["display_name"] and card["created_at"] == "2026-01-01T00:00:00Z"


def test_the_openai_client_lists_and_finds_models(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["deepseek-v4-flash"]
        assert client.models.retrieve("deepseek-chat").object == "model"
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.models.retrieve("gpt")

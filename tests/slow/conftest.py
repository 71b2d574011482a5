"""The file that the slow tests share."""
import pytest


@pytest.fixture(scope="session")
def flash_path(tmp_path_factory, v4_tokenizer_json):
    """Of Flash's full shape, with random weights; 3.4 GiB."""
    from slow.full_shape import write
    path = tmp_path_factory.mktemp("full") / "flash.gguf"
    write(path, v4_tokenizer_json)
    yield path
    path.unlink()

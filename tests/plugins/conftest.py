"""What several files of this folder need."""

import pytest


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A server of single letters for the tests of one file, which need fastapi and OpenAI's client."""
    from served import serve_letters

    served = serve_letters(tmp_path_factory.mktemp("letters"))
    yield served
    served.end()

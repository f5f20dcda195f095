"""What several files of this folder need."""

import numpy as np
import pytest

from stand.trees import BlendedLookup


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A server of single letters for the tests of one file, which need fastapi and OpenAI's client."""
    from served import serve_letters

    served = serve_letters(tmp_path_factory.mktemp("letters"))
    yield served
    served.end()


@pytest.fixture
def lessons(monkeypatch):
    """What lookups are taught: verb -> list of what was taught."""
    taught = {"laws": [], "tokens": [], "prompt": []}

    class Witness(BlendedLookup):
        def learn(self, context, token_ids, *, scope=0, **laws):
            taught["prompt"].append((np.asarray(token_ids).tolist(), scope))
            super().learn(context, token_ids, scope=scope, **laws)

        def learn_rows(self, tokens, lengths, num_new, *, rows, scopes):
            news = zip(rows, lengths, num_new, strict=True)
            taught["tokens"] += [tokens[row, end - new : end].tolist() for row, end, new in news]
            super().learn_rows(tokens, lengths, num_new, rows=rows, scopes=scopes)

        def learn_batch(self, batch, histories, top_ids, top_probs, nodes=None, *, scopes=None):
            for node in range(batch.num_nodes) if nodes is None else nodes:
                row = int(np.searchsorted(batch.offsets, node, side="right")) - 1
                path, at = [], int(node - batch.offsets[row])
                while at >= 0:
                    path.insert(0, int(batch.token_ids[batch.offsets[row] + at]))
                    at = int(batch.parents[batch.offsets[row] + at])
                taught["laws"].append(([*histories[row].tolist(), *path], top_ids[node], top_probs[node], scopes[row]))
            super().learn_batch(batch, histories, top_ids, top_probs, nodes, scopes=scopes)

    monkeypatch.setattr("stand.plugins.serving.options.BlendedLookup", Witness)
    return taught

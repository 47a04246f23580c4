"""The head of a reranker: scores of a query with a document, computed from the output of one token."""

from dataclasses import dataclass

from engine.arrays import Array, Value
from engine.models.linear import Linear
from engine.models.loader import Loader
from engine.ops.operations import Ops


@dataclass(frozen=True)
class Classifier:
    """The layer ``cls.output``, [labels, n_embd], after tanh of the layer ``cls``, [n_embd, n_embd], if there is one."""

    output: Linear
    dense: Linear | None = None

    def apply(self, ops: Ops, x: Value) -> Array:
        """The scores of the normalized rows x [rows, n_embd]: float32 [rows, labels]."""
        if self.dense is not None:
            x = ops.softcap(self.dense.apply(ops, x), 1.0)  # the bound 1 makes it a tanh
        return self.output.apply(ops, x)


def load_classifier(loader: Loader) -> Classifier:
    """Load the tensors ``cls.output`` and, if the file has them, ``cls``."""
    config = loader.config
    dense = loader.linear("cls", config.n_embd, config.n_embd) if loader.has("cls.weight") else None
    return Classifier(loader.linear("cls.output", max(1, len(config.labels)), config.n_embd), dense)

"""The head of a reranker: scores of a query with a document, computed from the output of one token."""

from dataclasses import dataclass

from engine.arrays import Array, Value
from engine.models.linear import Linear
from engine.models.loader import Loader
from engine.ops.operations import Ops


@dataclass(frozen=True)
class Classifier:
    """The layer ``cls.output``, [labels, n_embd]."""

    output: Linear

    def apply(self, ops: Ops, x: Value) -> Array:
        """The scores of the normalized rows x [rows, n_embd]: float32 [rows, labels]."""
        return self.output.apply(ops, x)


def load_classifier(loader: Loader) -> Classifier:
    """Load the tensors ``cls.output``."""
    config = loader.config
    return Classifier(loader.linear("cls.output", max(1, len(config.labels)), config.n_embd))

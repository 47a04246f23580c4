"""How long an answer took."""

from dataclasses import dataclass


@dataclass
class Timings:
    """Seconds and counts of one answer.

    ``prompt_n`` tokens were computed in ``prompt_s``, after ``cache_n`` tokens that the cache still held; ``predicted_n``
    tokens were generated in ``predicted_s``, counted from the end of the prompt; ``first_token_s`` is from the call to the
    first token.  ``load_s`` and ``compile_s`` are the model's.
    """

    load_s: float = 0.0
    compile_s: float = 0.0
    cache_n: int = 0
    prompt_n: int = 0
    prompt_s: float = 0.0
    predicted_n: int = 0
    predicted_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_n / self.prompt_s if self.prompt_s else 0.0

    @property
    def predicted_per_second(self) -> float:
        """Generated tokens per second."""
        return self.predicted_n / self.predicted_s if self.predicted_s else 0.0

"""How long an answer took."""

from dataclasses import dataclass


@dataclass
class Timings:
    """Seconds and counts of one answer.

    Attributes
    ----------
    load_s, compile_s : float
        Seconds that loading and compiling the model took.
    cache_n : int
        Tokens of the prompt that the cache still held.
    prompt_n : int
        Tokens of the prompt that were read.
    dropped_n : int
        Positions of the prompt that layers without a window have dropped (``kv_budget``).
    prompt_s : float
        Seconds that reading them took.
    predicted_n : int
        Tokens generated, with the end-of-generation token.
    predicted_s : float
        Seconds from the end of the prompt to the latest token.
    first_token_s : float
        Seconds from the beginning of the prompt to the first token.
    """

    load_s: float = 0.0
    compile_s: float = 0.0
    cache_n: int = 0
    prompt_n: int = 0
    dropped_n: int = 0
    prompt_s: float = 0.0
    predicted_n: int = 0
    predicted_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def prompt_per_second(self) -> float:
        """Tokens of the prompt read per second; 0.0 if the time was not measured."""
        return self.prompt_n / self.prompt_s if self.prompt_s else 0.0

    @property
    def predicted_per_second(self) -> float:
        """Tokens generated per second; 0.0 if the time was not measured."""
        return self.predicted_n / self.predicted_s if self.predicted_s else 0.0

"""A class of which users see what is documented."""


class Documented(type):
    """The type of a class that is made of others: ``help()`` and ``dir()`` list its ``documented`` names only."""

    documented: tuple[str, ...]

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if name.startswith("__") or name in cls.documented]

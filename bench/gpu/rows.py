"""A row of the table: what is looked at, in which unit, and the bar that it has to meet."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """unit: empty where the value is True or False, and True is wanted. Without a bar a row only informs."""

    name: str
    what: str
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def bar(self) -> str:
        if not self.unit:
            return "yes"
        if self.at_least is not None:
            return f">= {self.at_least:g} {self.unit}"
        return f"<= {self.at_most:g} {self.unit}" if self.at_most is not None else ""

    def met(self, value: float | bool) -> bool | None:
        """None where there is no bar."""
        if not self.unit:
            return value is True
        if self.at_least is not None:
            return value >= self.at_least
        return value <= self.at_most if self.at_most is not None else None

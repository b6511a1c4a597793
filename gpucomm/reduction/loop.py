"""Where this rank's training loop is between two reductions: what its forwards asked for, how many backwards ran."""


class Loop:
    """forwards: of the wrapper, in training; backwards: local ones too. Both since the last reduction."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """After a reduction."""
        self.forwards = 0
        self.backwards = 0
        # What the last forward asked for; None: there was none, so that the flag of the moment counts.
        self.reduce_next: bool | None = None
        self.is_incomplete = False  # a backward that is not reduced raised
        self.announced = False  # the program said that the next backward is to be reduced
        self._owes_reduction = False  # one of the forwards asked for it

    def note_forward(self, reduce: bool) -> None:
        self.reduce_next = reduce
        self._owes_reduction = self._owes_reduction or reduce
        self.forwards += 1

    def expect_reduction(self) -> None:
        """The next backward is reduced, whatever the last forward asked for."""
        self.reduce_next = self._owes_reduction = self.announced = True

    def begin_again(self) -> None:
        """The program dropped the gradients of this iteration. Peers that did not come to another count."""
        self.is_incomplete = False
        self.backwards = 0

    def note_local_end(self) -> None:
        """A backward that is not reduced came to its end."""
        # A forward of those before was to be reduced, and its backward is still to come; or each had its backward, and
        # the next one is of a forward past the wrapper.
        if self._owes_reduction or self.backwards >= self.forwards:
            self.reduce_next = None

"""A source process shared by the tests of a module, and destinations that are closed after each."""

from collections.abc import Callable, Iterator

import pytest

from transfer_jobs import Destination, Source

MakeDestination = Callable[..., Destination]


@pytest.fixture(scope="session")
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.close()


@pytest.fixture
def make_destination(source: Source) -> Iterator[MakeDestination]:
    """`Destination(...)`, closed at the end of the test."""
    made: list[Destination] = []

    def make(*arguments: object, **options: object) -> Destination:
        made.append(Destination(*arguments, **options))  # pyright: ignore[reportArgumentType]
        return made[-1]

    yield make
    for destination in made:
        source.forget(destination.number)
        destination.close()

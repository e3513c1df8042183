"""Results of a layer's operations that forward keeps, so that the layer's repetition in backward need not compute them.

As `torch.utils.checkpoint.create_selective_checkpoint_contexts`, also for layers that write into what is kept: there an
in-place ReLU ends the training, and a GRU on CPUs, whose parts of a product have no version, trains silently wrong
(measured with torch 2.13). Not for: which operations are kept (`trainer.parallel.activation_checkpointing`), or
compiling, where nothing is written in place.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.parallel.gradients import local_of

IsKept = Callable[[Any, Sequence[Any], Mapping[str, Any]], bool]
"""(operation, its arguments, those by name) to whether its result is kept. The same for the repetition."""
_COMPUTED_AGAIN: Final = object()


class KeptResults:
    """Those of one forward of one layer."""

    def __init__(self, is_kept: IsKept) -> None:
        self.is_kept = is_kept
        self._results: dict[Any, list[Any]] = defaultdict(list)
        """By operation, in the order of forward."""
        self._places: dict[int, list[tuple[Any, int]]] = defaultdict(list)
        """Of the results that lie in a storage, by its address, which is nobody else's as long as they are kept."""

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Those of forward and of its repetition, as `torch.utils.checkpoint.checkpoint` takes them."""
        return _Keeping(self), _Repeating(self)

    def let_go(self, output: Any) -> None:
        """What leaves the layer is computed again: whoever gets it may write into it."""
        for place in self._places_of(output):
            self._put(place, _COMPUTED_AGAIN)

    def run(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An operation of forward."""
        for operation_kept, index in self._places_of(_written(operation, args, kwargs)):
            kept = self._results[operation_kept][index]
            self._put((operation_kept, index), tree_map_only(torch.Tensor, torch.clone, kept))
        output = operation(*args, **kwargs)
        if self.is_kept(operation, args, kwargs):
            # Detached: autograd makes the output itself a part of the graph, which would keep itself alive.
            kept = tree_map_only(torch.Tensor, torch.Tensor.detach, output)
            place = (operation, len(self._results[operation]))
            self._results[operation].append(kept)
            for address in _addresses(kept):
                self._places[address].append(place)
        return output

    def repeat(self, turn: int, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operation's result of that turn, once; computed where none is kept."""
        results = self._results[operation]
        if turn >= len(results):
            raise RuntimeError(
                f"a layer called {operation} {len(results)} times in forward, and more often when it was computed "
                "again for backward. It must do the same both times, or use parallel.activation_checkpointing: none."
            )
        kept, results[turn] = results[turn], None
        if kept is None:
            raise RuntimeError(
                "what selective activation checkpointing keeps is only allowed to backward once; use "
                "parallel.activation_checkpointing: full, or none."
            )
        return operation(*args, **kwargs) if kept is _COMPUTED_AGAIN else kept

    def _places_of(self, values: Any) -> list[tuple[Any, int]]:
        """The places of all that lies in the storages of `values`, which from now on is there no more."""
        return [place for address in _addresses(values) for place in self._places.pop(address, ())]

    def _put(self, place: tuple[Any, int], value: Any) -> None:
        operation, index = place
        self._results[operation][index] = value


class _Keeping(TorchDispatchMode):
    """Around forward."""

    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._kept.run(func, args, kwargs or {})


class _Repeating(TorchDispatchMode):
    """Around the repetition."""

    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self._kept, self._turns = kept, Counter[Any]()

    def __enter__(self) -> _Repeating:
        self._turns.clear()  # the layer may be computed again more than once
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not self._kept.is_kept(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        self._turns[func] += 1
        return self._kept.repeat(self._turns[func] - 1, func, args, kwargs or {})


def _written(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes into."""
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _addresses(values: Any) -> Iterator[int]:
    for one in tree_leaves(values):
        if isinstance(one, torch.Tensor) and (address := local_of(one).untyped_storage().data_ptr()):
            yield address

"""The methods of a recorder that belong upstairs: each imports what it calls inside itself."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from scio_recorder.errors import ArgumentError
from scio_recorder.recorder.reading import Reading
from scio_recorder.tensors.arguments import boolean

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from typing import Literal

    from torch import Tensor

    from scio_recorder.analysis.guarding.guard import Action, Guard
    from scio_recorder.analysis.sweeping.effects import Effects


class Analysing(Reading):
    """The part of a recorder that finds out what layers do, and where they fail."""

    def sweep(
        self,
        clean: Any,
        corrupted: Any,
        metric: Callable[[Any], float | Tensor],
        positions: Literal["all"] | Iterable[int] | None = None,
        *,
        estimate: bool = False,
        whole_runs: bool = False,
    ) -> Effects:
        """Measure the effect of each recorded layer: activation patching.

        The network runs on the corrupted inputs once for each layer. In that run, the layer's
        output is replaced by its output in the clean run. Every run
        starts in the same state, random numbers included. Afterwards the network and the recorder
        are as before, and gradients have not changed.

        Parameters
        ----------
        clean, corrupted : Tensor, tuple or dict
            The inputs of the two runs: one tensor, several, or some by keyword. Layers must return
            the same shapes on both.
        metric : callable
            Takes the network's output, and returns a number or a tensor of shape ().
        positions : None, "all" or list of int
            Which positions of dimension 1 are patched, such as tokens, one in each run. Negative
            ones count from the end. None patches the whole output. In a structure all tensors are
            patched; with positions, those that share the first two dimensions of the first one.
        estimate : bool, default False
            Estimate the effects to first order, from gradients of one backward pass: attribution
            patching. The metric must be differentiable.
        whole_runs : bool, default False
            Start each run at its beginning. Otherwise modules ahead of the patched layer don't
            run again if their calls have no side effects: they return their outputs of the
            corrupted run. Changes of global variables can't be seen.

        Returns
        -------
        Effects
            ``values`` [layers] or [layers, positions] in float64, in the order of
            :attr:`recording`; ``clean`` and ``corrupted``, the metric of both runs.

        Raises
        ------
        ArgumentError
            ``estimate`` or ``whole_runs`` is not True or False.
        ComparisonError
            Nothing is recorded; a layer returns other shapes in the two runs; there is no such
            position; or the metric returns no number, or no gradient if one is needed.
        FlowError
            A module with a recorded layer ran more or less often than at labelling.
        UnsupportedNetError
            The network is compiled.

        References
        ----------
        Vig et al., "Investigating Gender Bias in Language Models Using Causal Mediation Analysis",
        NeurIPS 2020; Nanda, "Attribution Patching: Activation Patching At Industrial Scale", 2023.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.ReLU(), nn.Softmax(1)), input_size=(1, 2))
        >>> rnet.record("0")
        >>> clean, corrupted = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> effects = rnet.sweep(clean, corrupted, lambda output: output[0, 0], positions="all")
        >>> effects.values
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
        """
        from scio_recorder.analysis.sweeping.sweep import Sweep

        boolean("estimate", estimate, ArgumentError)
        boolean("whole_runs", whole_runs, ArgumentError)
        runs = Sweep(self._capture, clean, corrupted, metric)
        if estimate:
            return runs.estimated(positions)
        return runs.patched(positions, whole_runs=whole_runs)

    @contextlib.contextmanager
    def guard(
        self,
        *,
        gradients: bool = True,
        action: Action = "raise",
        kinds: Collection[str] = ("nan", "inf"),
        keep_inputs: bool = False,
    ) -> Iterator[Guard]:
        """Find the layer that makes the first NaN or infinity in a block.

        Every call of the network in the block is checked, whoever makes it, and so are the backward
        passes of these calls. All layers are checked, recorded or not. A layer makes a NaN
        if it returns one and received none, and an infinity if all its inputs were finite.

        Parameters
        ----------
        gradients : bool, default True
            Check gradients in backward passes as well.
        action : {"raise", "warn", "record"}
            What to do: raise an error at the place where the NaN is made, warn, or only set
            `origin`.
        kinds : collection of str, default ("nan", "inf")
            What to look for. With "nan" alone, infinities are ignored.
        keep_inputs : bool, default False
            Copy the inputs of each call until it returns, so that ``guard.origin.save(path)`` can
            write the inputs of the call that failed. This takes time, and memory for the inputs
            of all nested modules that are running.

        Yields
        ------
        Guard
            The result; its ``origin`` is None as long as nothing was found.

        Raises
        ------
        NonFiniteError
            A layer has made a NaN or an infinity; ``error.origin`` says which.
        ArgumentError
            ``action`` or ``kinds`` has a value that can't work.
        FlowError
            The network was not called in the block.
        UnsupportedNetError
            The network is compiled, or is compiled inside the block.

        Warns
        -----
        UserWarning
            The network passes on NaNs of its inputs or of the gradients of the loss.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> net = nn.Sequential(nn.ReLU(), nn.LayerNorm(2, eps=0.0))
        >>> rnet = Recorder(net, input_size=(1, 2))
        >>> with rnet.guard(action="record") as guard:
        ...     out = rnet(torch.tensor([[1.0, 2.0], [3.0, 3.0]]))
        >>> guard.origin.layer.name, guard.origin.num_nan, guard.origin.sample
        ('1', 2, 1)
        """
        from scio_recorder.analysis.guarding.calls import guarded
        from scio_recorder.analysis.guarding.guard import Guard

        boolean("gradients", gradients, ArgumentError)
        boolean("keep_inputs", keep_inputs, ArgumentError)
        watching = Guard(self.architecture, action, kinds)
        with guarded(self.architecture, watching, gradients=gradients, keep_inputs=keep_inputs):
            yield watching

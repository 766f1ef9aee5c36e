"""The inventory of column- and row-parallel linear layers and their low-rank adapters (LoRA: Hu et al., arXiv
2106.09685). No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..arithmetic_inventory import arithmetic_spec
from ..inventory import (
    KV_AXES,
    Collective,
    Execution,
    Moment,
    Operation,
    Operations,
    Parameter,
    Pass,
    Product,
    Weight,
)

CHUNK, MOST_CHUNKS = 32 * 2**20, 4
"""Bytes, of all ranks, that are worth a message of their own: it takes several times what its start takes."""


def forward_chunks(nbytes: int) -> int:
    """The number of chunks in which a message of ``nbytes``, of all ranks, is gathered or summed."""
    return max(1, min(nbytes // CHUNK, MOST_CHUNKS))


@dataclass(frozen=True)
class LoraSpec:
    """The kind of adapters that a model has.

    Attributes:
        rank: of the products ``B A``.
        scale: what they are multiplied by: alpha / rank.
        dropout: probability with which elements of their input are dropped in training.
    """

    rank: int
    scale: float
    dropout: float = 0.0


@dataclass(frozen=True)
class AdaptersSpec:
    """The adapters of one linear layer.

    Attributes:
        name: of the layer, from the stage's root.
        kind: rank, scale and dropout.
        inputs: global input features.
        outputs: module's name of each adapted weight -> its global output features.
        matrices: of the same, the declaration that its rows (or columns) are sharded like.
        row: the layer is row-parallel.
    """

    name: str
    kind: LoraSpec
    inputs: int
    outputs: Mapping[str, int]
    matrices: Mapping[str, Weight]
    row: bool

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All ``A``, fused along their rows; then each ``B``. ``B`` begins with zeros, so that the adapted
        model begins as the base; ``A`` with normal values of the variance that PEFT's uniform ones have."""
        rank, std = self.kind.rank, (3 * self.inputs) ** -0.5
        whole, tensor = frozenset[str](), frozenset({"tensor"})
        first, parameters = [], []
        for name, matrix in self.matrices.items():
            half = replace(matrix, frozen=False, adapter=True)
            divided, partial = ({"tensor": 1}, whole) if self.row else ({}, tensor)
            partial = partial if matrix.divided else matrix.partial
            a = replace(half, name=f"{name}.lora_a", shape=(rank, self.inputs), std=std)
            first.append(replace(a, divided=divided, partial=partial))
            b = replace(half, name=f"{name}.lora_b", shape=(self.outputs[name], rank), std=0.0)
            b = replace(b, divided={}, partial=tensor) if self.row else b
            parameters.append(Parameter(f"{self.name}.{b_name(name)}", (b,)))
        return Parameter(f"{self.name}.lora_a", tuple(first)), *parameters

    @property
    def width(self) -> int:
        """The features between all ``A`` and ``B`` of the adapters."""
        return self.kind.rank * len(self.outputs)

    def operations(self, run: Execution, local: int, widths: Mapping[str, int]) -> Operations:
        """The products of ``A`` and ``B`` for ``local`` input features and output features ``widths`` on a
        rank, the input gradient's before those of weights, and the mask's passes."""
        tokens, rank, every = run.tokens, self.kind.rank, self.width
        forward: list[Operation] = [Product("F", tokens, every, local)]
        backward: list[Operation] = []
        for name in self.outputs:
            forward.append(Product("F", tokens, widths[name], rank))
            backward.append(Product("B", tokens, rank, widths[name]))
        backward.append(Product("B", tokens, local, every))
        if self.kind.dropout:
            forward.insert(0, Pass("F", "activation", 2 * run.whole(local)))
            backward.append(Pass("B", "activation", 2 * run.whole(local)))
        backward.append(Product("W", every, local, tokens))
        backward += [Product("W", widths[name], rank, tokens) for name in self.outputs]
        return Operations(forward, backward)

    def kept(self, run: Execution) -> int:
        """Bytes from forward to backward: what lies between ``A`` and ``B``."""
        return run.whole(self.width)

    def operands(self, run: Execution, local: int) -> int:
        """Bytes held from ``B`` to ``W`` beside the layer's: the same scaled, its gradient, and the input
        with elements dropped."""
        return 2 * run.whole(self.width) + (run.whole(local) if self.kind.dropout else 0)


def b_name(name: str) -> str:
    """The attribute that holds ``B`` of a weight's module."""
    return f"lora_b_{name.rpartition('.')[2]}"


@dataclass(frozen=True)
class LinearSpec:
    """Linear layers that share an input, fused into one product, divided over the tensor axis; where several
    ranks hold the same shards of some of them, these are fused into a second one. A replicated layer is not
    divided: every tensor rank multiplies its rows of the residual stream.

    Attributes:
        name: of the module, from the stage's root.
        inputs: global input features.
        outputs: name of each weight's module -> global output features.
        row: the inputs are divided (row-parallel) and the outputs summed; otherwise each output is divided
            by itself (column-parallel).
        sequence: activations outside are divided over tokens.
        bias: whether there is one; a row-parallel layer's is added after the sum.
        std: standard deviation of the initial weights.
        unit: see :class:`Weight`.
        copied: the outputs whose shards are held by ``copies`` ranks each, see :data:`KV_AXES`.
        copies: divides the tensor degree.
        frozen: names of weights, also of other layers, that are not trained.
        lora: the kind of its adapters.
        adapted: names of outputs, also of other layers, that have one.
        replicated: every tensor rank holds all of it.
    """

    name: str
    inputs: int
    outputs: Mapping[str, int]
    row: bool
    sequence: bool
    bias: bool
    std: float
    unit: str
    copied: frozenset[str] = frozenset()
    copies: int = 1
    frozen: frozenset[str] = frozenset()
    lora: LoraSpec | None = None
    adapted: frozenset[str] = frozenset()
    replicated: bool = False

    def _execution(self, run: Execution) -> Execution:
        """How the layer is computed."""
        return run.replicated if self.replicated else run

    @property
    def features(self) -> int:
        """Global output features of all fused layers."""
        return sum(self.outputs.values())

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The fused weight, and the fused bias; then those of copied outputs; then those of adapters."""
        return (*self.layers, *(self.adapters.parameters if self.adapters else ()))

    @cached_property
    def layers(self) -> tuple[Parameter, ...]:
        """The fused weight, and the fused bias; then those of copied outputs."""
        sharded, copied = self._own_and_copied
        divided = Weight("", (), {"tensor": 1 if self.row else 0}, unit=self.unit)
        # A row-parallel layer's bias is whole on every rank, which in sequence parallel sees its own tokens.
        whole = Weight("", (), partial=frozenset({"tensor"} if self.sequence else ()), unit=self.unit)
        if self.replicated:
            return self._fused("", sharded, whole, whole)
        parameters = self._fused("", sharded, divided, whole if self.row else divided)
        if not copied:
            return parameters
        over, copies = KV_AXES
        kind = Weight("", (), {over: 0}, frozenset({copies}), unit=self.unit)
        return (*parameters, *self._fused("copied_", copied, kind, kind))

    def _fused(
        self, prefix: str, outputs: Mapping[str, int], weight: Weight, bias: Weight
    ) -> tuple[Parameter, ...]:
        """Weights and biases of some outputs, divided like ``weight`` and ``bias``."""
        matrix, inputs = replace(weight, decay=True, std=self.std), self.inputs
        weights = [self._named(matrix, f"{n}.weight", (size, inputs)) for n, size in outputs.items()]
        parameters = (Parameter(f"{self.name}.{prefix}weight", tuple(weights)),)
        if not self.bias:
            return parameters
        biases = [self._named(bias, f"{n}.bias", (size,)) for n, size in outputs.items()]
        return (*parameters, Parameter(f"{self.name}.{prefix}bias", tuple(biases)))

    def _named(self, kind: Weight, name: str, shape: tuple[int, ...]) -> Weight:
        return replace(kind, name=name, shape=shape, frozen=name in self.frozen)

    @cached_property
    def adapters(self) -> AdaptersSpec | None:
        """The low-rank adapters of the layer; None without them."""
        if self.lora is None or not self.adapted & self.outputs.keys():
            return None
        weights = [weight for parameter in self.layers for weight in parameter.weights]
        names = {weight.name.removesuffix(".weight"): weight for weight in weights}
        matrices = {name: weight for name, weight in names.items() if name in self.adapted}
        outputs = {name: self.outputs[name] for name in matrices}
        return AdaptersSpec(self.name, self.lora, self.inputs, outputs, matrices, self.row)

    @property
    def _own_and_copied(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """The outputs of which every rank has a shard of its own, and the others."""
        sharded = {name: size for name, size in self.outputs.items() if name not in self.copied}
        return sharded, {name: size for name, size in self.outputs.items() if name in self.copied}

    @cached_property
    def matrices(self) -> tuple[Parameter, ...]:
        """The trained weights of the layer and its adapters, without biases."""
        return tuple(parameter for parameter in self.parameters if parameter.matrix and not parameter.frozen)

    @property
    def trained(self) -> bool:
        """Whether a weight's gradient is computed, for which the input is kept."""
        return bool(self.matrices)

    @property
    def trains(self) -> bool:
        """Whether any of its parameters is trained, biases included."""
        return any(not parameter.frozen for parameter in self.parameters)

    @property
    def _own_trained(self) -> bool:
        """Whether the layer's own weights are trained, besides adapters."""
        return any(layer.matrix and not layer.frozen for layer in self.layers)

    def local(self, run: Execution) -> tuple[int, int]:
        """The numbers of (input, output) features on a rank."""
        run = self._execution(run)
        if self.row:
            return self.inputs // run.tensor, self.features
        return self.inputs, sum(self._widths(run))

    def _widths(self, run: Execution) -> tuple[int, ...]:
        """Output features on a rank of each fused weight."""
        run = self._execution(run)
        if self.row:
            return (self.features,)
        sharded, copied = (sum(outputs.values()) for outputs in self._own_and_copied)
        return (sharded // run.tensor, *([copied * self.copies // run.tensor] if copied else []))

    def products(self, run: Execution) -> list[Product]:
        """One of each matrix in each action, for frozen ones none in ``W``."""
        return self.operations(run, False).products

    def operations(self, run: Execution, split: bool, reached: bool = True) -> Operations:
        """The operations of a rank; with ``split`` weight gradients are actions of their own; ``reached``:
        the input needs a gradient.

        Column-parallel: the input is gathered (sequence parallel); its gradient is summed while the weight's
        is computed, for which it is gathered again while the input's gradient is computed, or in ``W``.
        Row-parallel: the output is summed; its gradient is gathered (sequence parallel).
        """
        over, run = (run.tensor > 1 and not self.replicated), self._execution(run)
        forward, of_input, of_weights = self._computed(run, split)
        if not reached:
            of_input = []
        if not over:
            return Operations(forward, of_input + of_weights, len(forward))
        whole = run.whole(self.features if self.row else self.inputs)
        scatter = "reduce_scatter" if run.sequence else "all_reduce"
        if self.row:
            outputs = (self.features, *([self.adapters.width] if self.adapters is not None else []))
            forward = self._summed(run, forward, scatter, whole)
            forward = arithmetic_spec(run).summed(run, forward, scatter, outputs)
            needed = run.sequence and (reached or self.trains)
            gather = [Collective("B", "tensor", "all_gather", whole, meanwhile=True)] if needed else []
            return Operations(forward, [*gather, *of_input, *of_weights], len(forward))
        again: list[Operation] = []
        later = split and not self.dropping(run)
        if run.sequence:
            forward = self._gathered(run, forward, whole)
            if self.trained:
                again = [Collective("W" if later else "B", "tensor", "all_gather", whole, len(of_input))]
        beside = 0 if split else len(of_weights)
        reduce: list[Operation] = []
        if reached:
            reduce = [Collective("B", "tensor", scatter, whole, beside, meanwhile=not run.sequence)]
        if later:
            return Operations(forward, [*of_input, *reduce, *again, *of_weights], len(forward))
        return Operations(forward, [*again, *of_input, *reduce, *of_weights], len(forward))

    def _computed(
        self, run: Execution, split: bool
    ) -> tuple[list[Operation], list[Operation], list[Operation]]:
        """Products and passes: forward, of the input's gradient, of weights' gradients."""
        inputs, widths, eight = self.local(run)[0], self._widths(run), arithmetic_spec(run).eight
        forward: list[Operation] = [Product("F", run.tokens, width, inputs, eight=eight) for width in widths]
        of_input: list[Operation] = [Product("B", run.tokens, inputs, width, eight=eight) for width in widths]
        of_weights: list[Operation] = []
        if self._own_trained:
            aside = self.set_aside(run, split)
            of_weights = [
                Product("W", width, inputs, run.tokens, aside=aside, eight=eight) for width in widths
            ]
        if self.bias:
            rows = run.stream(self.features) if self.row else 0
            forward += [Pass("F", "bias", 2 * rows)] if self.row else []
            sums = [rows] if self.row else [run.whole(width) for width in widths]
            trained = any(not layer.matrix and not layer.frozen for layer in self.layers)
            of_weights += [Pass("W", "bias", size, 2) for size in sums] if trained else []
        if self.adapters is not None:
            names = {name: self._width(name, run) for name in self.adapters.outputs}
            added = self.adapters.operations(run, inputs, names)
            forward += added.forward
            of_input += [op for op in added.backward if op.action == "B"]
            of_weights += [op for op in added.backward if op.action == "W"]
        return forward, of_input, of_weights

    def _chunks(self, run: Execution) -> list[int]:
        """Rows of a rank in each chunk of the forward pass."""
        rows = run.rows if run.sequence else run.tokens
        divided = self.adapters is None and arithmetic_spec(run).batched
        count = max(1, min(run.chunks, rows)) if divided else 1
        return [rows * (number + 1) // count - rows * number // count for number in range(count)]

    def _gathered(self, run: Execution, computed: list[Operation], whole: int) -> list[Operation]:
        """A forward pass that gathers its input: a chunk while the one before is multiplied."""
        chunks = self._chunks(run)
        parts = [whole * rows // run.rows for rows in chunks]
        parts[-1] += whole - sum(parts)
        if len(chunks) == 1:
            return [Collective("F", "tensor", "all_gather", whole), *computed]
        operations: list[Operation] = [Collective("F", "tensor", "all_gather", parts[0])]
        for rows, following in zip(chunks, [*parts[1:], 0]):
            if following:
                operations.append(Collective("F", "tensor", "all_gather", following, len(computed)))
            operations += [_of_rows(op, rows * run.tensor, run.tensor) for op in computed]
        return operations

    def _summed(self, run: Execution, computed: list[Operation], sum_: str, whole: int) -> list[Operation]:
        """A forward pass that sums its output: a chunk while the next one is multiplied."""
        chunks = self._chunks(run)
        parts = [whole * rows // sum(chunks) for rows in chunks]
        parts[-1] += whole - sum(parts)
        products = [op for op in computed if not isinstance(op, Pass) or op.kind != "bias"]
        added = [op for op in computed if isinstance(op, Pass) and op.kind == "bias"]
        if len(chunks) == 1:
            return [*products, Collective("F", "tensor", sum_, whole), *added]
        operations: list[Operation] = []
        ranks = run.tensor if run.sequence else 1
        for number, (rows, size) in enumerate(zip(chunks, parts)):
            operations += [_of_rows(op, rows * ranks, ranks) for op in products]
            beside = len(products) if number < len(chunks) - 1 else 0
            operations.append(Collective("F", "tensor", sum_, size, beside))
        return [*operations, *added]

    def _width(self, name: str, run: Execution) -> int:
        """Features of one output on a rank."""
        run = self._execution(run)
        if self.row:
            return self.features
        return self.outputs[name] * (self.copies if name in self.copied else 1) // run.tensor

    def operands(self, run: Execution) -> int:
        """Bytes of the weight gradient's operands: the input as it was kept, and the output's gradient."""
        if not self.trained:
            return 0
        run = self._execution(run)
        inputs, outputs = self.local(run)
        kept = run.whole(inputs) if self.row else run.stream(inputs)
        if self.adapters is None:
            return kept + run.whole(outputs)
        if self.adapters.kind.dropout and not self._own_trained:
            kept = 0  # of the input, only what is not dropped
        return kept + run.whole(outputs) + self.adapters.operands(run, inputs)

    def set_aside(self, run: Execution, split: bool) -> bool:
        """Whether its weight's gradient is set aside, to be computed beside a collective: that of a
        row-parallel layer. In a ``B`` (``split``), where others are deferred, only if gradients are kept: a
        bucket that is reduced in every microbatch would have a buffer from ``B`` to ``W``."""
        aside = self.row and run.tensor > 1 and self._own_trained
        return aside and (not split or (run.keeps_gradients and self.adapters is None))

    def aside(self, run: Execution, split: bool) -> int:
        """Bytes of the operands of a product that is set aside."""
        return self.operands(run) if self.set_aside(run, split) else 0

    def deferred(self, run: Execution) -> int:
        """Bytes of operands held from ``B`` to ``W``."""
        return 0 if self.set_aside(run, True) else self.operands(run)

    def kept(self, run: Execution) -> int:
        """Bytes that adapters keep from forward to backward."""
        return 0 if self.adapters is None else self.adapters.kept(self._execution(run))

    def dropping(self, run: Execution) -> int:
        """Bytes that dropout of adapters' inputs needs for a moment: a tensor as large as the input, and what
        draws the mask."""
        if self.adapters is None or not self.adapters.kind.dropout:
            return 0
        run = self._execution(run)
        inputs = self.local(run)[0]
        return run.whole(inputs) + run.mask(run.tokens * inputs)

    def weight_product(self, run: Execution) -> int:
        """Bytes of the largest weight's gradient before it is added in another format."""
        if not self._own_trained:
            return 0
        run = self._execution(run)
        return arithmetic_spec(run).weight_gradient(run, self.local(run)[0], self._widths(run))

    def input_gradient(self, run: Execution) -> int:
        """Bytes that the products for the input's gradient need, their result included, where the arithmetic
        needs more than that."""
        run = self._execution(run)
        return arithmetic_spec(run).input_gradient(run, self.local(run)[0], self._widths(run))

    def products_forward(self, run: Execution) -> int:
        """Bytes that the arithmetic needs beside the layer's input, as the layer received it, and its
        result."""
        run = self._execution(run)
        arithmetic, inputs, adapters = arithmetic_spec(run), self.local(run)[0], 0
        if self.adapters is not None:
            widths = [self._width(name, run) for name in self.adapters.outputs]
            adapters = arithmetic.adapter_outputs(run, self.adapters.kind.rank, widths) + self.dropping(run)
        if self.row:
            return arithmetic.row_forward(run, inputs, self.features, adapters)
        return arithmetic.column_forward(run, inputs, self._widths(run), adapters)

    def forward_copies(self, run: Execution) -> int:
        """Bytes of copies of input and weights that the forward products multiply."""
        run = self._execution(run)
        return arithmetic_spec(run).forward_copies(run, *self.local(run))

    def rounded(self, run: Execution) -> int:
        """Bytes of copies of the weights that are kept until the next update."""
        run = self._execution(run)
        return arithmetic_spec(run).kept_weights(run, self.local(run)[0], self._widths(run))

    def backward(self, run: Execution, recomputed: bool, split: bool) -> Moment:
        """Memory of a column-parallel layer's backward: its input, where that is recomputed or gathered, and
        the input's gradient with the parts of other ranks that are added to it."""
        run = self._execution(run)
        stream, whole, gathered = run.stream(self.inputs), run.whole(self.inputs), run.gathered(self.inputs)
        before = (stream if recomputed else 0) + (0 if split else gathered) if self.trained else 0
        summed = stream if gathered else 0
        product = max(0 if split else self.weight_product(run), summed)
        dropping = self.dropping(run) + (whole if self.dropping(run) else 0)  # of the gradient
        needed = before + max(self.input_gradient(run), whole + gathered + max(product, dropping))
        return Moment(needed, before + whole + gathered, self.matrices)


def _of_rows(operation: Operation, rows: int, groups: int) -> Operation:
    """A product of some of the rows, of so many ranks."""
    assert isinstance(operation, Product)
    return operation._replace(m=rows, groups=groups)

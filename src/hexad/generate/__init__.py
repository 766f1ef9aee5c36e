"""Generation: key/value cache, sampling, tensor-parallel ranks. The package can be called:
``hexad.generate(source, prompts)`` is :func:`hexad.api.generate`."""

from hexad.callable_package import make_callable

make_callable(__name__)

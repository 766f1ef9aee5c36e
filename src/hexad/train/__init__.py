"""Training. The package can be called: ``hexad.train(config)`` is :func:`hexad.api.train`."""

from hexad.callable_package import make_callable

make_callable(__name__)

"""Functions and methods as modules, and modules that share the state of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fxround.python_model.outside_state import OutsideState


class Sharing(nn.Module):
    """A module with the parameters, buffers, submodules and training flag of another, under the same names."""

    source: nn.Module

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        shared = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
        self.__dict__.update({name: getattr(source, name) for name in shared}, source=source)

    @property
    def training(self) -> bool:
        """The other module's own flag: train() and eval() on either are seen by both."""
        return bool(self.source.training) if "source" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        """The other module's own flag, so that train() and eval() on either change both."""
        if "source" in self.__dict__:
            self.source.training = mode

    def get_submodule(self, target: str) -> nn.Module:
        """Return the other module's submodule; the other module itself for ""."""
        return self.source.get_submodule(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return the other module's parameter."""
        return self.source.get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        """Return the other module's buffer."""
        return self.source.get_buffer(target)


class Function(nn.Module):
    """A function of tensors as a module, so that it is captured like one.

    Its submodules, parameters and buffers are the modules and tensors that the function's code reaches by name. Its
    training flag is theirs: train() and eval() on either are seen by both.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.__dict__["_outside"] = None

    def adopt(self) -> None:
        """Take the modules and tensors that the function reaches now as the module's own."""
        outside = self.__dict__["_outside"]
        if outside is not None and outside.is_current():
            return
        outside = self.__dict__["_outside"] = OutsideState(self.function)
        for kind in (self._modules, self._parameters, self._buffers):
            kind.clear()
        for name, value in outside.found.items():
            if isinstance(value, nn.Module):
                self._modules[name] = value
            else:
                held: dict[str, Any] = self._parameters if value.requires_grad else self._buffers
                held[name] = value

    @property
    def training(self) -> bool:
        """Whether a module of the function is in training mode; without modules, the function's own flag."""
        modules = self.__dict__.get("_modules")
        return any(m.training for m in modules.values()) if modules else bool(self.__dict__.get("_training", True))

    @training.setter
    def training(self, mode: bool) -> None:
        """Set the own flag; ``train`` sets those of the modules."""
        self.__dict__["_training"] = mode

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the parameters that the function reaches now."""
        self.adopt()
        return super().named_parameters(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # What a copy of the function reaches is found again.
        return self.__dict__ | {"_outside": None}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's result."""
        return self.function(*args, **kwargs)


class Method(Function, Sharing):
    """A method of a module, as a module that shares its state; only that method is captured."""

    training = Sharing.training

    def __init__(self, function: Any) -> None:
        Sharing.__init__(self, function.__self__)
        self.__dict__["function"] = function

    def adopt(self) -> None:
        """Do nothing: the state is the module's."""

    def train(self, mode: bool = True) -> Any:
        """Set the training flag by the module's own ``train``."""
        self.source.train(mode)
        return self


def calling(path: str) -> Callable[..., Any]:
    """Return a method that calls a submodule of its module."""
    names = path.split(".")

    def submodule(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        for name in names:
            module = getattr(module, name)
        return module(*args, **kwargs)

    return submodule

"""What can be wrong with a kernel. Each message names the kernel and, where one is known, its line."""
from ds4mlx.errors import Ds4Error


class EmulatorError(Ds4Error):
    """Base of every fault found in a kernel, or in what is needed to run one."""


class NoCompilerError(EmulatorError):
    """This machine has no compiler for Metal's dialect, or none that can do what was asked."""


class CompileError(EmulatorError):
    """The kernel's text does not compile."""


class StrictError(CompileError):
    """The text compiles as C++ but Apple's compiler would refuse it."""


class LimitError(EmulatorError):
    """More threads or threadgroup memory than a Metal device has."""


class OutOfBoundsError(EmulatorError):
    """An access outside a buffer, a threadgroup variable or an array."""


class DivergenceError(EmulatorError):
    """Threads of one group are at different barriers or SIMD-group operations."""


class UndefinedBehaviourError(EmulatorError):
    """A misaligned access, a bad shift, a division by zero, a float outside the integer's range."""


class EndlessLoopError(EmulatorError):
    """The kernel did not end within the time allowed."""


class RaceError(EmulatorError):
    """Two threads touch one byte with no barrier between, or the outputs depend on the order in which threads run."""

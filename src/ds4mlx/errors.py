"""The errors a caller may act on. Every message says what was found, what was needed and what to do."""


class Ds4Error(Exception):
    """Base of all errors raised on purpose; its text is fit to be shown to a user."""


class UsageError(Ds4Error):
    """An option, an environment variable or a key of a configuration file that says something impossible."""


class BadRequest(Ds4Error):
    """A request that cannot be served as it is. `status` is its HTTP status, `param` the field at fault.

    `details` are further members of the API's error object (`n_prompt_tokens`, `n_ctx`).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None,
                 status: int = 400, details: dict[str, int] | None = None) -> None:
        super().__init__(message)
        self.param, self.code, self.status, self.details = param, code, status, details or {}


class ModelFileError(Ds4Error):
    """A model file that is missing, damaged, foreign or of an unsupported shape."""


class CheckpointError(Ds4Error):
    """A saved session state that cannot be used."""


class DoesNotFit(Ds4Error):
    """More memory is needed than the machine or the given limit has."""


class Cancelled(Ds4Error):
    """The work was given up on request: the client left, or the process is shutting down."""

"""The two ways tinysrt says no: to a request, and to a start-up; and what a rank says when another one is gone.

The first two carry one sentence that a stranger can act on. Neither knows HTTP: the doors
(`tinysrt/entrypoints/errors.py`) turn a `RequestError` into the body their API promises, and the
command line turns a `StartupError` into one line and a non-zero exit code.

Invariant: what a user can cause raises one of these; `assert` is only for what our own bug can break.
"""


class RequestError(ValueError):
    """A request that will not be run, or that ended before its time.

    message: one sentence, says what to do; no file paths, no tracebacks
    status:  HTTP status, 400 unless said otherwise (404 unknown model, 413 too large, 503 busy)
    param:   the field at fault, if one is
    code:    a short machine-readable name (`model_not_found`, `context_length_exceeded`), if one fits
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code


class StartupError(RuntimeError):
    """The server cannot start: one clear line for the terminal, and exit code 1."""


class RankLost(ConnectionError):
    """Another rank of the group has ended, so this one cannot go on. Never the cause: that rank has a reason of its
    own, and whoever watches both reports that one."""

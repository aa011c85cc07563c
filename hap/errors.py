"""Every error HAP raises on purpose. All are ``ValueError``: we refuse what the caller gave, and the text says what."""


class HapError(ValueError):
    """Base of all refusals. The message is one line a user can act on; the CLI prints it and exits with code 2."""


class ClusterError(HapError):
    """A cluster description that is malformed, physically impossible or does not match the running job."""


class CaptureError(HapError):
    """A module that cannot be captured as one static graph; the message says where in the user's code."""


class MissingRuleError(HapError):
    """An operator without a sharding rule; the message names the operator, the calling module and the remedy."""


class InfeasibleError(HapError):
    """No plan satisfies the constraints; the message names the binding one in the user's words."""


class PlanError(HapError):
    """A plan file that is truncated, edited, of another version, or made for another model or cluster."""


class ProgramError(HapError):
    """A compiled program used against its contract: wrong local shapes, uninitialised parameters, wrong world size."""


class RuleError(HapError):
    """A sharding rule given by the user that is malformed or that running the operator refutes."""

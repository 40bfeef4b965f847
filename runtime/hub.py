"""From what a user calls a model to a folder on disk: the folder itself, or a Hub id."""

import re
from pathlib import Path
from typing import cast

from lowbit.formats.errors import CheckpointError

HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
FILES = ["*.safetensors", "*.json", "*.jinja"]


def model_folder(model: str) -> Path:
    """The folder of a model, downloaded or taken from the local Hub cache where it is a Hub id.

    Raises:
        CheckpointError: neither a folder nor a Hub repository that can be reached.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    if not HUB_ID.match(model) or model.startswith("."):
        raise CheckpointError(f"`{model}` does not exist", hint="give a folder or a Hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    # of whichever HTTP library the Hub client was built on
    http_error = cast("type[Exception]", HfHubHTTPError.__bases__[0])

    try:
        return Path(snapshot_download(model, allow_patterns=FILES))
    except GatedRepoError:
        raise CheckpointError(
            f"`{model}` is gated on the Hub", hint="accept its terms there, then `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"`{model}` is neither a folder nor a repository on the Hub",
            hint="check the spelling; a private repository needs `hf auth login`",
        ) from None
    except (OSError, ValueError, http_error) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"`{model}` is not a folder here, and the Hub did not give it: {reason}",
            hint="check the connection, or download it elsewhere and give its folder",
        ) from None

"""A target that training has changed: another model, in a directory of its own beside the drafter that guesses for it alone."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from ..errors import OutOfMemory
from ..models import weights
from ..protocols import Renewal
from ..trained import UNFINISHED

WARNING = (
    "this training CHANGES THE TARGET: what comes out is another model, whose texts differ from those of {model}, and a drafter "
    "that works with that one alone"
)


def publish(pupil: Renewal, loaded: weights.Loaded, place: Path) -> str:
    """Write the new target to the directory `place`, with the old one's tokenizer; tell the pupil, and return, its hash."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", suffix=UNFINISHED, dir=place.parent) as fresh, weights.quiet():
            made = Path(fresh) / place.name
            pupil.save_target(made)
            loaded.tokenizer.backend.save_pretrained(made)
            shutil.rmtree(place, ignore_errors=True)
            made.replace(place)
    except (OSError, SafetensorError) as error:
        raise OutOfMemory(
            f"the new target cannot be saved in {place} ({error}); make room and run the command again: training is kept"
        ) from error
    fingerprint = weights.fingerprint(weights.resolve(str(place)))
    pupil.rename(place.name, fingerprint)
    return fingerprint

"""axolotl: a plug-in that attaches a policy to the trainer of an axolotl config.

Example:
    ```yaml
    plugins:
      - narrowcast.integrations.axolotl.NarrowcastPlugin
    narrowcast:
      policy: bf16, params=bf16, master=split
      health_every: 100
    ```
"""

from typing import Any

from axolotl.integrations.base import BasePlugin  # type: ignore
from pydantic import BaseModel, ConfigDict

from narrowcast.integrations.transformers import attach


class NarrowcastSettings(BaseModel):
    """The settings of `attach`; further ones go to `prepare`."""

    model_config = ConfigDict(extra="allow")

    policy: str = "default"
    schedule: dict[int, str] | None = None
    health_every: int = 0


class NarrowcastArgs(BaseModel):
    """What the plug-in adds to an axolotl config."""

    narrowcast: NarrowcastSettings = NarrowcastSettings()


class NarrowcastPlugin(BasePlugin):  # type: ignore[misc]
    """Trains in a policy's precision. Name it under `plugins` of the config."""

    def get_input_args(self) -> str:
        """Return where axolotl finds the settings of the plug-in."""
        return f"{__name__}.{NarrowcastArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Attach the policy."""
        attach(trainer, **NarrowcastSettings(**dict(cfg.narrowcast or {})).model_dump())

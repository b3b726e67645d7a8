"""Which profile serves a call that is given by its extents, as an engine would choose by the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dspark_trt.engines.tensorrt.compiler.profiles import Profile, choose_profile


def chosen_profile(profiles: Sequence[Profile], extents: Mapping[str, int]) -> int:
    """Raises EngineBuildError when there is none."""
    ranges = [{name: ((e.smallest,), (e.largest,)) for name, e in profile.extents.items()} for profile in profiles]
    return choose_profile(ranges, {name: (size,) for name, size in extents.items()}, where="engine")

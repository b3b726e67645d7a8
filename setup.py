"""Which packages an installation holds: every room, found in its folder, so that none can be forgotten in a list.

pyproject.toml says everything else. Setuptools finds packages by itself only where a folder has its package's name, and
two have not.
"""

from setuptools import find_packages, setup

FOLDERS = {"dspark_trt": "dspark_trt", "dspark_trt_plugins": "plugins", "dspark_trt_model_repo": "triton_model_repo"}

setup(
    packages=[
        package
        for name, folder in FOLDERS.items()
        for package in (name, *(f"{name}.{room}" for room in find_packages(folder)))
    ],
    package_dir={name: folder for name, folder in FOLDERS.items() if name != folder},
)

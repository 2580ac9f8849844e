"""Install the folders kernels/ and launch/ as apbv.kernels and apbv.launch.

A top-level package named ``kernels`` would shadow the Hugging Face package of that name, which
transformers looks for, so the folder is mapped under ``apbv`` and never importable on its own.
"""

from setuptools import find_packages, setup

setup(
    packages=["apbv.kernels", "apbv.launch", *find_packages(include=["apbv", "apbv.*"])],
    package_dir={"apbv.kernels": "kernels", "apbv.launch": "launch"},
    package_data={
        "apbv": ["py.typed"],
        "apbv.kernels": ["tiles.json"],
        "apbv.model.families": ["families.toml"],
        "apbv.serve.metrics": ["*.toml"],
        "apbv.serve.protocols": ["*.toml"],
        "apbv.testing": ["models.toml"],
        "apbv.demo": ["clip.mp4", "model/*", "draft/*", "*.png", "README.md"],
    },
)

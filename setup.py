"""The kernels/ and launch/ folders install as apbv.kernels and apbv.launch.

A top-level package named ``kernels`` would shadow the Hugging Face package of that name, which
transformers looks for, so the folder is mapped under ``apbv`` and never importable on its own.
"""

from setuptools import setup

setup(
    packages=[
        "apbv",
        "apbv.demo",
        "apbv.integrations",
        "apbv.kernels",
        "apbv.launch",
        "apbv.methods",
        "apbv.serve",
        "apbv.speculate",
    ],
    package_dir={"apbv.kernels": "kernels", "apbv.launch": "launch"},
    package_data={
        "apbv": ["py.typed"],
        "apbv.demo": ["clip.mp4", "model/*", "draft/*", "*.png", "README.md"],
    },
)

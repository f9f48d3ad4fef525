"""Saving and going on with PyTorch, JAX, Lightning and Hugging Face, in the job of a gang.

Purpose: one module for each library, which writes its checkpoints into the
gang's and begins from them again. Each imports its library, and nothing else
does: Airflow never loads them. They travel with the job in ``runtime.pyz``.

Limits: they use the public handle only (:mod:`airflow_gpu.runtime.api`); a
program can do all of this by itself. Python 3.8 and later, as in the runtime.

Example::

    from airflow_gpu.frameworks.torch import restore, save
"""

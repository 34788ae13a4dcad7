"""Compiles the grammars of requests in child processes, which a hostile grammar may end."""

from triptych.deployments.grammars.compiler import GrammarCompiler, process_compiler

__all__ = ["GrammarCompiler", "process_compiler"]

"""``LoweredPipeline``: a pipeline's programs before they run."""

from ftp.runtime.pipeline_program import PipelineProgram


class LoweredPipeline:
    """A pipelined step before it runs."""

    def __init__(self, program: PipelineProgram):
        self._program = program

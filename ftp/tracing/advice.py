"""Advice on errors that other libraries' code raises while it is traced."""


def advice_on(error: Exception) -> str:
    """Advice on an error; "" where there is none."""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if "transformers" in code.co_filename and (
            "Experts" in code.co_qualname or code.co_filename.endswith("moe.py")
        ):
            return (
                "\n  These are a model's experts, in a form that cannot be traced. Build the model"
                " with"
                ' config.experts_implementation="batched_mm"'
                ' (from_config(..., experts_implementation="batched_mm")): its shapes are fixed.'
            )
        traceback = traceback.tb_next
    return ""

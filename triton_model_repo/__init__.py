"""The Triton models, installed as `dspark_trt_model_repo` so that a build can copy them into its own repository.

`config.pbtxt` beside each model is what `dspark_trt.packaging` writes into a build, kept here to be read.
"""

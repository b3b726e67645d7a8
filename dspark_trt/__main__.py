"""`python -m dspark_trt` is `dspark-trt`."""

from dspark_trt.cli import main

main()

"""The hot loops: public functions with a plain torch version, which the CPU uses, and for some a Triton one."""

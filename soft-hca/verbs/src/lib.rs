//! soft-hca as libibverbs.so.1.

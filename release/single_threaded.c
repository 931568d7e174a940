/* libstdc++'s headers read this variable, which glibc has since 2.32. 0 means that there may be several threads. */
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

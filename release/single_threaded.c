/* libstdc++'s headers read this variable of glibc 2.32. 0 means that there may be several threads, as there are. */
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

/* Which pages of a range of memory are written to: the range is made read-only, and the first write to each page is
 * noted, after which the page may be written. For Linux and other POSIX systems; one range at a time. */
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

static volatile uintptr_t begin, end;
static unsigned char *marks;
static long page;
static struct sigaction before;

static void noted(int signal, siginfo_t *info, void *context) {
    uintptr_t at = (uintptr_t)info->si_addr;
    if (at >= begin && at < end) {
        uintptr_t first = at - at % page;
        marks[(first - begin) / page] = 1;
        mprotect((void *)first, page, PROT_READ | PROT_WRITE);
    } else {
        sigaction(SIGSEGV, &before, 0); /* not ours: the write is repeated, and whoever was there before hears of it */
    }
}

int watch_start(void *address, long bytes, long page_size, unsigned char *pages) {
    struct sigaction mine;
    memset(&mine, 0, sizeof mine);
    mine.sa_sigaction = noted;
    mine.sa_flags = SA_SIGINFO | SA_NODEFER;
    page = page_size;
    marks = pages;
    begin = (uintptr_t)address;
    end = begin + bytes;
    if (sigaction(SIGSEGV, &mine, &before)) return -1;
    return mprotect(address, bytes, PROT_READ);
}

int watch_stop(void) {
    int result = mprotect((void *)begin, end - begin, PROT_READ | PROT_WRITE);
    sigaction(SIGSEGV, &before, 0);
    begin = end = 0;
    return result;
}

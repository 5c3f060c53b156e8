/* Records which pages of a memory range are read and written. The range is protected; the first access of each kind to
 * a page is recorded and then allowed. For Linux and other POSIX systems; one range at a time. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

enum { kRead = 1, kWritten = 2 };

static volatile uintptr_t begin, end;
static unsigned char* marks;
static long page;
static struct sigaction before;

/* If the processor does not report the kind of access, a page first becomes readable, and a write faults again. Two
 * threads that read a page at the same time then look like a write, so only one thread should run. */
static int is_write(void* context, unsigned char mark) {
#if defined(__x86_64__) && defined(REG_ERR)
  return (((ucontext_t*)context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#else
  return mark != 0;
#endif
}

static void noted(int signal, siginfo_t* info, void* context) {
  uintptr_t at = (uintptr_t)info->si_addr;
  if (at >= begin && at < end) {
    uintptr_t first = at - at % page;
    unsigned char* mark = marks + (first - begin) / page;
    int write = is_write(context, *mark) || (*mark & kWritten);
    *mark |= write ? kWritten : kRead;
    mprotect((void*)first, page, write ? PROT_READ | PROT_WRITE : PROT_READ);
  } else {
    sigaction(SIGSEGV, &before, 0); /* not ours: the access is retried with the previous handler */
  }
}

int watch_start(void* address, long bytes, long page_size, unsigned char* pages) {
  struct sigaction mine;
  memset(&mine, 0, sizeof mine);
  mine.sa_sigaction = noted;
  mine.sa_flags = SA_SIGINFO | SA_NODEFER;
  page = page_size;
  marks = pages;
  begin = (uintptr_t)address;
  end = begin + bytes;
  if (sigaction(SIGSEGV, &mine, &before)) return -1;
  return mprotect(address, bytes, PROT_NONE);
}

int watch_stop(void) {
  int result = mprotect((void*)begin, end - begin, PROT_READ | PROT_WRITE);
  sigaction(SIGSEGV, &before, 0);
  begin = end = 0;
  return result;
}

/* Calls kernels for a parent process: compiled for AArch64, run by qemu-aarch64 (benchmarks/emulation.py).

   A call has the parent's own arguments, addresses among them. The first touch of a page of the parent is a fault: the
   page is fetched from the parent, and sent back after the call. Each call begins in a floating-point environment that no
   kernel may compute in (rounding up, subnormals flushed, default NaNs, a flag raised), which must be the same after it.

   Requests, in 64-bit words:  1 length length path name        2 address count arguments
   Answers:                    1 address                        3 page (answered by 1 and the page, or 0)
                               0 length message                 4 count (page address, page)                             */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 1 << 16, ARGUMENTS = 16 };
typedef uint64_t word;
typedef void (*kernel)(word, word, word, word, word, word, word, word, word, word, word, word, word, word, word, word);

static word touched[PAGES];
static word count;
/* FPCR: round up, flush to zero, default NaN. FPSR: inexact. */
static const word control = 1u << 22 | 1u << 24 | 1u << 25, status = 1u << 4;

static void take(void *to, size_t size) {
    for (char *at = to; size;) {
        ssize_t n = read(0, at, size);
        if (n <= 0) _exit(n ? 2 : 0);
        at += n, size -= n;
    }
}

static void give(const void *from, size_t size) {
    for (const char *at = from; size;) {
        ssize_t n = write(1, at, size);
        if (n <= 0) _exit(2);
        at += n, size -= n;
    }
}

static void answer(word kind, word value) {
    word words[2] = {kind, value};
    give(words, sizeof words);
}

static void refuse(const char *message) {
    answer(0, strlen(message));
    give(message, strlen(message));
}

static void stop(const char *message) {
    refuse(message);
    _exit(3);
}

static void fault(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    word page = (word)info->si_addr & -(word)PAGE, known;
    answer(3, page);
    take(&known, sizeof known);
    /* A hint, so that nothing that is mapped already is replaced. */
    if (!known) stop("the kernel left its operands");
    if (count == PAGES) stop("the kernel touched more pages than a call may");
    void *at = mmap((void *)page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if ((word)at != page) stop("a page of the parent cannot be mapped here");
    touched[count++] = page;
    take(at, PAGE);
}

static void load(void) {
    word lengths[2];
    char path[4096], name[256];
    take(lengths, sizeof lengths);
    if (lengths[0] >= sizeof path || lengths[1] >= sizeof name) _exit(2);
    take(path, lengths[0]);
    take(name, lengths[1]);
    path[lengths[0]] = name[lengths[1]] = 0;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL), *found = library ? dlsym(library, name) : 0;
    if (found)
        answer(1, (word)found);
    else
        refuse(dlerror());
}

static void call(void) {
    word head[2], a[ARGUMENTS] = {0}, after_control, after_status;
    take(head, sizeof head);
    if (head[1] > ARGUMENTS) _exit(2);
    take(a, head[1] * sizeof *a);
    count = 0;
    __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(control), "r"(status) : "memory");
    /* Arguments beyond a kernel's own are in registers or stack slots that it does not read. */
    ((kernel)head[0])(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15]);
    __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(after_control), "=r"(after_status) : : "memory");
    __asm__ volatile("msr fpcr, xzr\n\tmsr fpsr, xzr" : : : "memory");
    if (after_control != control || after_status != status)
        stop("the kernel changed its caller's floating-point environment");
    answer(4, count);
    for (word i = 0; i < count; i++) {
        give(&touched[i], sizeof touched[i]);
        give((void *)touched[i], PAGE);
        munmap((void *)touched[i], PAGE);
    }
}

int main(void) {
    struct sigaction action = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, 0);
    for (;;) {
        word kind;
        take(&kind, sizeof kind);
        if (kind == 1) load();
        else if (kind == 2) call();
        else return 2;
    }
}

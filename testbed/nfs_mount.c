/*
 * nfs_mount: an NFS 3 export as a folder, through FUSE, for nodes whose kernel has no NFS client.
 *
 *     nfs_mount SERVER EXPORT FOLDER PATIENCE_MS FLAGS
 *
 * PATIENCE_MS: after so long without an answer a call fails with EIO; 0: never, as with the mount option "hard".
 * FLAGS: what the kernel is told of the mount, such as "ro,nosuid".
 *
 * One loop takes what FUSE's kernel side asks and makes one call of NFS of it, as a rule; any number of calls wait for the
 * server side by side. Each has the uid and gid of the process that caused it, or of the one that opened the file; the
 * server decides. Of a process's further groups the server learns nothing. A process that is killed while its server
 * does not answer goes at once, as with the kernel's client: its call is abandoned, and forgotten when it comes back.
 *
 * What the kernel is told, it keeps as long as its own client would, by the defaults of nfs(5): attributes and names of
 * files 3 s, of folders 30 s, twice as long each time they have not changed, up to 60 s. Names that are not there are
 * not kept, as with lookupcache=positive. A file is looked up again whenever it is opened. If it has changed, or another
 * is there in its place, the answer is ESTALE, upon which the kernel forgets what it knew of the path, looks all of it
 * up, and opens anew. Data are kept until the attributes change. Locks hold on this machine only.
 */
#define FUSE_USE_VERSION 312
#include "nfs_rpc.h"

#include <arpa/inet.h>
#include <fuse_lowlevel.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

/* Fixed, so that the port mapper need not be asked and a firewall can know it. */
enum { MOUNT_PORT = 20048, NFS_PORT = 2049, MOUNT_PROGRAM = 100005, NFS_PROGRAM = 100003, MOUNT_MNT = 1 };
/* How often a waiting process is asked whether it has been killed. */
enum { LOOK_MS = 20 };
/* A name that a thread has looked up so short ago is not looked up again when it opens it: one call did both. */
enum { SAME_CALL_US = 1000 };
enum { KEPT_FILE_SECONDS = 3, KEPT_FOLDER_SECONDS = 30, KEPT_MOST_SECONDS = 60 };
/* Attributes in a listing that is older are not passed on. */
enum { LISTED_MS = 1000 };
enum { MOST_NAME = 255, MOST_PATH = 4096, MOST_HANDLE = 64, VERIFIER = 8, TABLE_SIZE = 1 << 16 };

/* Procedures of NFS 3 (RFC 1813). */
enum {
    GETATTR = 1, SETATTR, LOOKUP, ACCESS, READLINK, READ, WRITE, CREATE, MKDIR, SYMLINK, MKNOD, REMOVE, RMDIR, RENAME, LINK,
    READDIR, READDIRPLUS, FSSTAT, FSINFO, PATHCONF, COMMIT
};
enum { MAY_READ = 1, MAY_MODIFY = 4, MAY_EXECUTE = 32 }; /* bits of ACCESS */
enum { BAD_COOKIE = 10003 };

struct handle {
    uint32_t size;
    char bytes[MOST_HANDLE];
};

/* What FUSE calls an inode, and NFS a handle: a file of which the kernel knows. */
struct node {
    struct handle handle;
    struct node *next;     /* in its chain of the table */
    uint64_t lookups;      /* how often the kernel was told of it and has not forgotten it */
    uint32_t calls;        /* in flight */
    struct stat attributes; /* as the kernel was told */
    int64_t told_ms;
    int kept_seconds;
    /* How it was last found, for the next open; of folders, which are opened without a call, nothing. */
    struct handle folder;
    char *name;
    pid_t finder;
    int64_t found_us;
    /* The last answer about what a user may do with it, while its attributes stay. */
    bool has_access;
    uid_t access_uid;
    gid_t access_gid;
    uint32_t access;
};

/* All of a folder, read when a process begins to read it. */
struct listing {
    struct listed {
        char name[MOST_NAME + 1];
        struct stat attributes; /* st_mode 0: unknown */
        struct handle handle;
    } *entries;
    size_t count, room;
    uint64_t cookie;
    char verifier[VERIFIER];
    int64_t read_ms;
};

struct call;
/* Goes on with the reply to a call; true if the call has gone to the server once more. `error` is 0 or an errno. */
typedef bool step_t(struct call *call, int error, struct reply *reply);

struct call {
    fuse_req_t request; /* NULL: the process was killed, nobody waits */
    pid_t pid;
    uid_t uid;
    gid_t gid;
    bool is_interrupted;
    struct node *node;
    step_t *step;
    struct message *message;
    struct fuse_file_info file;
    char name[MOST_NAME + 1];
    char *data; /* read so far */
    size_t size, got;
    off_t offset;
    struct listing listing;
    bool is_plus;
    struct call *next;
};

static struct server server;
static struct fuse_session *session;
static struct node root;
static struct node *table[TABLE_SIZE];
static struct call *calls;
static size_t most_read = MOST_DATA, most_write = MOST_DATA;

/* Files. */

static struct node **place_of(const struct handle *handle)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (uint32_t i = 0; i < handle->size; i++)
        hash = (hash ^ (unsigned char)handle->bytes[i]) * 1099511628211u;
    struct node **place = &table[(hash ^ hash >> 32) % TABLE_SIZE];
    while (*place != NULL && memcmp(&(*place)->handle, handle, sizeof *handle) != 0)
        place = &(*place)->next;
    return place;
}

static struct node *node_of(fuse_ino_t inode)
{
    return inode == FUSE_ROOT_ID ? &root : (struct node *)(uintptr_t)inode;
}

static struct node *find_node(const struct handle *handle)
{
    struct node **place = place_of(handle);
    if (*place == NULL) {
        *place = allocate(sizeof **place);
        (*place)->handle = *handle;
    }
    return *place;
}

static void free_unused(struct node *node)
{
    if (node == &root || node->lookups > 0 || node->calls > 0)
        return;
    *place_of(&node->handle) = node->next;
    free(node->name);
    free(node);
}

static void forget_name(struct node *node)
{
    free(node->name);
    node->name = NULL;
}

static bool is_same(const struct timespec *a, const struct timespec *b)
{
    return a->tv_sec == b->tv_sec && a->tv_nsec == b->tv_nsec;
}

static bool has_changed(const struct stat *before, const struct stat *now)
{
    return before->st_size != now->st_size || before->st_mode != now->st_mode ||
           !is_same(&before->st_mtim, &now->st_mtim) || !is_same(&before->st_ctim, &now->st_ctim);
}

/* Note what the kernel is about to be told of a file. Returns for how many seconds it may keep that. */
static int tell(struct node *node, const struct stat *now)
{
    const int64_t ms = now_ms();
    if (node->kept_seconds == 0 || has_changed(&node->attributes, now)) {
        node->kept_seconds = S_ISDIR(now->st_mode) ? KEPT_FOLDER_SECONDS : KEPT_FILE_SECONDS;
        node->has_access = false;
    } else if (ms - node->told_ms >= node->kept_seconds * 1000) {
        node->kept_seconds *= 2;
        if (node->kept_seconds > KEPT_MOST_SECONDS)
            node->kept_seconds = KEPT_MOST_SECONDS;
    }
    node->told_ms = ms;
    node->attributes = *now;
    return node->kept_seconds;
}

/* Tell of a file under a name. The caller counts the lookup if the kernel takes it. */
static struct node *introduce(const struct handle *handle, const struct stat *attributes, struct fuse_entry_param *entry)
{
    struct node *node = find_node(handle);
    *entry = (struct fuse_entry_param){.ino = node == &root ? FUSE_ROOT_ID : (fuse_ino_t)(uintptr_t)node,
                                       .generation = 1,
                                       .attr = *attributes};
    entry->attr_timeout = entry->entry_timeout = tell(node, attributes);
    return node;
}

/* Parts of calls and replies. */

static void put_handle(struct message *message, const struct handle *handle)
{
    put_opaque(message, handle->bytes, handle->size);
}

static void put_name(struct message *message, const char *name)
{
    put_opaque(message, name, strlen(name));
}

static struct handle get_handle(struct reply *reply)
{
    struct handle handle = {0};
    size_t size;
    const char *bytes = get_opaque(reply, &size, MOST_HANDLE);
    handle.size = (uint32_t)size;
    memcpy(handle.bytes, bytes, size);
    return handle;
}

static struct timespec get_time(struct reply *reply)
{
    const uint32_t seconds = get_32(reply);
    return (struct timespec){.tv_sec = seconds, .tv_nsec = get_32(reply)};
}

static struct stat get_attributes(struct reply *reply)
{
    static const mode_t types[] = {0, S_IFREG, S_IFDIR, S_IFBLK, S_IFCHR, S_IFLNK, S_IFSOCK, S_IFIFO};
    struct stat now = {0};
    const uint32_t type = get_32(reply);
    now.st_mode = (type < 8 ? types[type] : 0) | (get_32(reply) & 07777);
    now.st_nlink = get_32(reply);
    now.st_uid = get_32(reply);
    now.st_gid = get_32(reply);
    now.st_size = (off_t)get_64(reply);
    now.st_blocks = (blkcnt_t)((get_64(reply) + 511) / 512);
    now.st_rdev = get_64(reply);
    get_64(reply); /* fsid */
    now.st_ino = get_64(reply);
    now.st_atim = get_time(reply);
    now.st_mtim = get_time(reply);
    now.st_ctim = get_time(reply);
    now.st_blksize = MOST_DATA; /* as the kernel's client: programs write in pieces of this size */
    return now;
}

/* Attributes that may be left out; then st_mode is 0. */
static struct stat get_optional_attributes(struct reply *reply)
{
    return get_32(reply) != 0 ? get_attributes(reply) : (struct stat){0};
}

static int errno_of(uint32_t status)
{
    static const struct {
        uint32_t status;
        int error;
    } others[] = {
        {63, ENAMETOOLONG}, {66, ENOTEMPTY}, {69, EDQUOT},       {70, ESTALE},    {71, EREMOTE},
        {10001, ESTALE},    {10003, EINVAL}, {10004, EOPNOTSUPP}, {10005, EINVAL}, {10006, EFAULT},
        {10007, EINVAL},    {10008, EAGAIN},
    };
    if (status <= 30) /* these are the numbers of Unix */
        return (int)status;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (others[i].status == status)
            return others[i].error;
    return EIO;
}

/* Calls. */

/* The signals in one line of /proc/PID/status. */
static unsigned long long signals(const char *status, const char *name)
{
    const char *line = strstr(status, name);
    return line == NULL ? 0 : strtoull(line + strlen(name), NULL, 16);
}

/* Whether a process is about to end by a signal. FUSE tells of every one; the kernel's client stops for these only. */
static bool is_killed(pid_t pid)
{
    const unsigned long long harmless =
        1ull << (SIGCHLD - 1) | 1ull << (SIGCONT - 1) | 1ull << (SIGURG - 1) | 1ull << (SIGWINCH - 1);
    char text[4096];

    snprintf(text, sizeof text, "/proc/%d/status", (int)pid);
    FILE *file = fopen(text, "r");
    if (file == NULL)
        return true;
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    const unsigned long long pending = signals(text, "\nSigPnd:") | signals(text, "\nShdPnd:");
    const unsigned long long withheld =
        signals(text, "\nSigBlk:") | signals(text, "\nSigIgn:") | signals(text, "\nSigCgt:");
    return (pending & ~withheld & ~harmless) != 0;
}

static void note_interrupt(fuse_req_t request, void *call)
{
    (void)request;
    ((struct call *)call)->is_interrupted = true;
}

/* Answer those that were killed. Returns whether others have had a signal: they are to be looked at again soon. */
static bool abandon_killed(void)
{
    bool has_others = false;
    for (struct call *call = calls; call != NULL; call = call->next) {
        if (call->request == NULL || !call->is_interrupted)
            continue;
        if (is_killed(call->pid)) {
            fuse_reply_err(call->request, EINTR);
            call->request = NULL;
        } else {
            has_others = true;
        }
    }
    return has_others;
}

/* Begin the work for a request of FUSE about a file. */
static struct call *begin(fuse_req_t request, fuse_ino_t inode, const struct fuse_file_info *file)
{
    const struct fuse_ctx *who = fuse_req_ctx(request);
    struct call *call = allocate(sizeof *call);
    call->request = request;
    call->pid = who->pid;
    call->uid = who->uid;
    call->gid = who->gid;
    if (file != NULL) {
        call->file = *file;
        call->uid = (uid_t)(file->fh >> 32); /* of who opened it */
        call->gid = (gid_t)file->fh;
    }
    call->node = node_of(inode);
    call->node->calls++;
    call->next = calls;
    calls = call;
    fuse_req_interrupt_func(request, note_interrupt, call);
    return call;
}

static void end(struct call *call)
{
    struct call **place = &calls;
    while (*place != call)
        place = &(*place)->next;
    *place = call->next;
    call->node->calls--;
    free_unused(call->node);
    free(call->listing.entries);
    free(call->data);
    free(call);
}

/* Begin a call of NFS, to which the caller adds what follows the first handle. */
static struct message *ask(struct call *call, uint32_t procedure, const struct handle *handle, size_t data_size)
{
    call->message = rpc_begin(&server, NFS_PROGRAM, procedure, call->uid, call->gid, data_size);
    put_handle(call->message, handle);
    return call->message;
}

static step_t reopen, list; /* these go on after some errors */

static void finish(void *owner, int error, struct reply *reply)
{
    struct call *call = owner;
    if (error == 0)
        error = errno_of(get_32(reply));
    else
        error = -error;
    if (call->request != NULL) {
        if (error != 0 && call->step != reopen && call->step != list)
            fuse_reply_err(call->request, error);
        else if (call->step(call, error, reply))
            return;
    }
    end(call);
}

static void go(struct call *call, step_t *step)
{
    call->step = step;
    rpc_send(&server, call->message, finish, call);
}

/* True if a name is too long; then the request has its answer. */
static bool is_refused(fuse_req_t request, const char *name)
{
    if (strlen(name) <= MOST_NAME)
        return false;
    fuse_reply_err(request, ENAMETOOLONG);
    return true;
}

static bool answer_done(struct call *call, int error, struct reply *reply)
{
    (void)reply;
    fuse_reply_err(call->request, error);
    return false;
}

/* Attributes. */

static void answer_with(struct call *call, const struct stat *now)
{
    const int seconds = tell(call->node, now);
    fuse_reply_attr(call->request, now, seconds);
}

static bool answer_attributes(struct call *call, int error, struct reply *reply)
{
    const struct stat now = get_attributes(reply);
    (void)error;
    if (reply->is_short)
        fuse_reply_err(call->request, EIO);
    else
        answer_with(call, &now);
    return false;
}

static void do_getattr(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file)
{
    struct call *call = begin(request, inode, NULL);
    (void)file;
    ask(call, GETATTR, &call->node->handle, 0);
    go(call, answer_attributes);
}

/* Skip what an operation's reply says of the time before it. */
static bool get_before(struct reply *reply, struct stat *before)
{
    if (get_32(reply) == 0)
        return false;
    before->st_size = (off_t)get_64(reply);
    before->st_mtim = get_time(reply);
    before->st_ctim = get_time(reply);
    return true;
}

static bool answer_set(struct call *call, int error, struct reply *reply)
{
    struct stat before;
    (void)error;
    get_before(reply, &before);
    const struct stat now = get_optional_attributes(reply);
    if (now.st_mode != 0 && !reply->is_short) {
        answer_with(call, &now);
        return false;
    }
    ask(call, GETATTR, &call->node->handle, 0);
    go(call, answer_attributes);
    return true;
}

static void put_set(struct message *message, bool is_set, uint32_t value)
{
    put_32(message, is_set);
    if (is_set)
        put_32(message, value);
}

static void put_set_time(struct message *message, bool is_set, bool is_now, const struct timespec *time)
{
    put_32(message, !is_set ? 0 : is_now ? 1 : 2);
    if (is_set && !is_now) {
        put_32(message, (uint32_t)time->tv_sec);
        put_32(message, (uint32_t)time->tv_nsec);
    }
}

/* All that SETATTR and the calls that make something may set. `valid`: FUSE_SET_ATTR_... */
static void put_new_attributes(struct message *message, const struct stat *new, int valid)
{
    put_set(message, valid & FUSE_SET_ATTR_MODE, new->st_mode & 07777);
    put_set(message, valid & FUSE_SET_ATTR_UID, new->st_uid);
    put_set(message, valid & FUSE_SET_ATTR_GID, new->st_gid);
    put_32(message, (valid & FUSE_SET_ATTR_SIZE) != 0);
    if (valid & FUSE_SET_ATTR_SIZE)
        put_64(message, (uint64_t)new->st_size);
    put_set_time(message, valid & FUSE_SET_ATTR_ATIME, valid & FUSE_SET_ATTR_ATIME_NOW, &new->st_atim);
    put_set_time(message, valid & FUSE_SET_ATTR_MTIME, valid & FUSE_SET_ATTR_MTIME_NOW, &new->st_mtim);
}

static void do_setattr(fuse_req_t request, fuse_ino_t inode, struct stat *new, int valid, struct fuse_file_info *file)
{
    struct call *call = begin(request, inode, file);
    struct message *message = ask(call, SETATTR, &call->node->handle, 0);
    put_new_attributes(message, new, valid);
    put_32(message, 0); /* whatever its ctime is */
    go(call, answer_set);
}

static bool answer_volume(struct call *call, int error, struct reply *reply)
{
    const uint64_t block = 4096;
    struct statvfs volume = {.f_bsize = block, .f_frsize = block, .f_namemax = MOST_NAME};
    (void)error;
    get_optional_attributes(reply);
    volume.f_blocks = get_64(reply) / block;
    volume.f_bfree = get_64(reply) / block;
    volume.f_bavail = get_64(reply) / block;
    volume.f_files = get_64(reply);
    volume.f_ffree = get_64(reply);
    volume.f_favail = get_64(reply);
    if (reply->is_short)
        fuse_reply_err(call->request, EIO);
    else
        fuse_reply_statfs(call->request, &volume);
    return false;
}

static void do_statfs(fuse_req_t request, fuse_ino_t inode)
{
    struct call *call = begin(request, inode, NULL);
    ask(call, FSSTAT, &call->node->handle, 0);
    go(call, answer_volume);
}

/* Names. */

/* Note where a file was found, and answer with it: in `opened`, as a new file that is open. */
static void answer_found(struct call *call, const struct handle *handle, const struct stat *now,
                         const struct fuse_file_info *opened)
{
    struct fuse_entry_param entry;
    struct timespec time;
    struct node *node = introduce(handle, now, &entry);
    if (!S_ISDIR(now->st_mode)) {
        if (node->name == NULL || strcmp(node->name, call->name) != 0) {
            forget_name(node);
            node->name = strdup(call->name);
        }
        node->folder = call->node->handle;
        node->finder = call->pid;
        clock_gettime(CLOCK_MONOTONIC, &time);
        node->found_us = time.tv_sec * 1000000LL + time.tv_nsec / 1000;
    }
    node->lookups++;
    if ((opened != NULL ? fuse_reply_create(call->request, &entry, opened) : fuse_reply_entry(call->request, &entry)) != 0)
        node->lookups--;
    free_unused(node);
}

static bool answer_lookup(struct call *call, int error, struct reply *reply)
{
    const struct handle handle = get_handle(reply);
    const struct stat now = get_optional_attributes(reply);
    (void)error;
    if (reply->is_short || now.st_mode == 0)
        fuse_reply_err(call->request, ESTALE); /* gone between two looks of the server; the kernel asks again */
    else
        answer_found(call, &handle, &now, NULL);
    return false;
}

static void do_lookup(fuse_req_t request, fuse_ino_t folder, const char *name)
{
    if (is_refused(request, name))
        return;
    struct call *call = begin(request, folder, NULL);
    strcpy(call->name, name);
    put_name(ask(call, LOOKUP, &call->node->handle, 0), name);
    go(call, answer_lookup);
}

static void do_forget(fuse_req_t request, fuse_ino_t inode, uint64_t count)
{
    struct node *node = node_of(inode);
    node->lookups -= count < node->lookups ? count : node->lookups;
    free_unused(node);
    fuse_reply_none(request);
}

/* After a call that makes something. A server may leave out what it has made, which none does that is known to us. */
static bool answer_made(struct call *call, int error, struct reply *reply)
{
    const struct handle handle = get_32(reply) != 0 ? get_handle(reply) : (struct handle){0};
    const struct stat now = get_optional_attributes(reply);
    (void)error;
    if (reply->is_short || handle.size == 0 || now.st_mode == 0)
        fuse_reply_err(call->request, EIO);
    else
        answer_found(call, &handle, &now, call->size != 0 ? &call->file : NULL);
    return false;
}

/* Begin a call that makes something under a name. */
static struct call *begin_making(fuse_req_t request, fuse_ino_t folder, const char *name, uint32_t procedure)
{
    if (is_refused(request, name))
        return NULL;
    struct call *call = begin(request, folder, NULL);
    strcpy(call->name, name);
    put_name(ask(call, procedure, &call->node->handle, MOST_PATH), name);
    return call;
}

static void do_mkdir(fuse_req_t request, fuse_ino_t folder, const char *name, mode_t mode)
{
    struct call *call = begin_making(request, folder, name, MKDIR);
    if (call == NULL)
        return;
    put_new_attributes(call->message, &(struct stat){.st_mode = mode}, FUSE_SET_ATTR_MODE);
    go(call, answer_made);
}

static void do_symlink(fuse_req_t request, const char *target, fuse_ino_t folder, const char *name)
{
    struct call *call = begin_making(request, folder, name, SYMLINK);
    if (call == NULL)
        return;
    put_new_attributes(call->message, &(struct stat){.st_mode = 0777}, FUSE_SET_ATTR_MODE);
    put_name(call->message, target);
    go(call, answer_made);
}

static void set_opener(struct call *call)
{
    call->file.fh = (uint64_t)call->uid << 32 | call->gid;
    call->file.keep_cache = 1; /* data go when the kernel is told of other attributes */
}

static void do_create(fuse_req_t request, fuse_ino_t folder, const char *name, mode_t mode, struct fuse_file_info *file)
{
    struct call *call = begin_making(request, folder, name, CREATE);
    if (call == NULL)
        return;
    call->file = *file;
    call->size = 1; /* it is to be opened too */
    set_opener(call);
    put_32(call->message, file->flags & O_EXCL ? 1 : 0);
    put_new_attributes(call->message, &(struct stat){.st_mode = mode},
                       FUSE_SET_ATTR_MODE | (file->flags & O_TRUNC ? FUSE_SET_ATTR_SIZE : 0));
    go(call, answer_made);
}

static bool answer_link(struct call *call, int error, struct reply *reply)
{
    const struct stat now = get_optional_attributes(reply);
    (void)error;
    struct fuse_entry_param entry;
    if (reply->is_short || now.st_mode == 0) {
        fuse_reply_err(call->request, EIO);
        return false;
    }
    introduce(&call->node->handle, &now, &entry)->lookups++;
    if (fuse_reply_entry(call->request, &entry) != 0)
        call->node->lookups--;
    return false;
}

static void do_link(fuse_req_t request, fuse_ino_t inode, fuse_ino_t folder, const char *name)
{
    if (is_refused(request, name))
        return;
    struct call *call = begin(request, inode, NULL);
    struct message *message = ask(call, LINK, &call->node->handle, 0);
    put_handle(message, &node_of(folder)->handle);
    put_name(message, name);
    go(call, answer_link);
}

static void remove_name(fuse_req_t request, fuse_ino_t folder, const char *name, uint32_t procedure)
{
    if (is_refused(request, name))
        return;
    struct call *call = begin(request, folder, NULL);
    put_name(ask(call, procedure, &call->node->handle, 0), name);
    go(call, answer_done);
}

static void do_unlink(fuse_req_t request, fuse_ino_t folder, const char *name)
{
    remove_name(request, folder, name, REMOVE);
}

static void do_rmdir(fuse_req_t request, fuse_ino_t folder, const char *name)
{
    remove_name(request, folder, name, RMDIR);
}

static void do_rename(fuse_req_t request, fuse_ino_t folder, const char *name, fuse_ino_t new_folder, const char *new_name,
                      unsigned int flags)
{
    if (flags != 0) { /* as the kernel's client */
        fuse_reply_err(request, EINVAL);
        return;
    }
    if (is_refused(request, name) || is_refused(request, new_name))
        return;
    struct call *call = begin(request, folder, NULL);
    struct message *message = ask(call, RENAME, &call->node->handle, 0);
    put_name(message, name);
    put_handle(message, &node_of(new_folder)->handle);
    put_name(message, new_name);
    go(call, answer_done);
}

static bool answer_target(struct call *call, int error, struct reply *reply)
{
    char target[MOST_PATH] = {0};
    size_t size;
    (void)error;
    get_optional_attributes(reply);
    const char *bytes = get_opaque(reply, &size, sizeof target - 1);
    memcpy(target, bytes, size);
    if (reply->is_short)
        fuse_reply_err(call->request, EIO);
    else
        fuse_reply_readlink(call->request, target);
    return false;
}

static void do_readlink(fuse_req_t request, fuse_ino_t inode)
{
    struct call *call = begin(request, inode, NULL);
    ask(call, READLINK, &call->node->handle, 0);
    go(call, answer_target);
}

/* Open files. */

/* Whether `granted`, bits of ACCESS, are enough for the way in which a file is opened. */
static bool is_enough(const struct call *call, uint32_t granted)
{
    const int mode = call->file.flags & O_ACCMODE;
    const bool can_read = (granted & (MAY_READ | MAY_EXECUTE)) != 0, can_write = (granted & MAY_MODIFY) != 0;
    return (mode == O_WRONLY || can_read) && (mode == O_RDONLY || can_write);
}

static void answer_open(struct call *call, uint32_t granted)
{
    if (is_enough(call, granted))
        fuse_reply_open(call->request, &call->file);
    else
        fuse_reply_err(call->request, EACCES);
}

static bool answer_access(struct call *call, int error, struct reply *reply)
{
    struct node *node = call->node;
    (void)error;
    get_optional_attributes(reply);
    node->access = get_32(reply);
    node->access_uid = call->uid;
    node->access_gid = call->gid;
    node->has_access = !reply->is_short;
    if (reply->is_short)
        fuse_reply_err(call->request, EIO);
    else
        answer_open(call, node->access);
    return false;
}

/*
 * The last step of opening: whether the user may. The mode tells where it grants by uid and gid alone, except for root,
 * whom the server may take for nobody. Else the server is asked.
 */
static bool check_access(struct call *call)
{
    const struct node *node = call->node;
    const struct stat *now = &node->attributes;
    const mode_t bits = call->uid == now->st_uid ? now->st_mode >> 6
                        : call->gid == now->st_gid ? now->st_mode >> 3 : now->st_mode;
    const uint32_t by_mode = (bits & 4 ? MAY_READ : 0) | (bits & 2 ? MAY_MODIFY : 0) | (bits & 1 ? MAY_EXECUTE : 0);
    const bool is_known = node->has_access && node->access_uid == call->uid && node->access_gid == call->gid;

    if (is_known || (call->uid != 0 && is_enough(call, by_mode))) {
        answer_open(call, is_known ? node->access : by_mode);
        return false;
    }
    put_32(ask(call, ACCESS, &node->handle, 0), MAY_READ | MAY_MODIFY | MAY_EXECUTE);
    go(call, answer_access);
    return true;
}

/* After a file that is opened was looked at again, under its name or, without one, by its handle. */
static bool reopen(struct call *call, int error, struct reply *reply)
{
    struct node *node = call->node;
    const bool by_name = call->size != 0;
    struct handle handle = node->handle;
    struct stat now = {0};

    if (error == 0 && by_name) {
        handle = get_handle(reply);
        now = get_optional_attributes(reply);
    } else if (error == 0) {
        now = get_attributes(reply);
    }
    if (error == 0 && (reply->is_short || now.st_mode == 0))
        error = EIO;
    if (error == ENOENT || error == ENOTDIR || memcmp(&handle, &node->handle, sizeof handle) != 0)
        error = ESTALE;
    if (error == 0 && has_changed(&node->attributes, &now)) {
        fuse_lowlevel_notify_inval_inode(session, node == &root ? FUSE_ROOT_ID : (fuse_ino_t)(uintptr_t)node, -1, 0);
        tell(node, &now);
        /* Without a name the file may be one that is open already and has none any more: the kernel could not find it. */
        error = by_name ? ESTALE : 0;
    }
    if (error != 0) {
        forget_name(node); /* the kernel's next look gives it a name again */
        fuse_reply_err(call->request, error);
        return false;
    }
    return check_access(call);
}

static void do_open(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file)
{
    struct call *call = begin(request, inode, NULL);
    struct node *node = call->node;
    struct timespec time;

    call->file = *file;
    set_opener(call);
    clock_gettime(CLOCK_MONOTONIC, &time);
    const int64_t now_us = time.tv_sec * 1000000LL + time.tv_nsec / 1000;
    if (node->name != NULL && node->finder == call->pid && now_us - node->found_us < SAME_CALL_US) {
        node->finder = 0;
        if (!check_access(call))
            end(call);
        return;
    }
    call->size = node->name != NULL;
    if (node->name != NULL)
        put_name(ask(call, LOOKUP, &node->folder, 0), node->name);
    else
        ask(call, GETATTR, &node->handle, 0);
    go(call, reopen);
}

static void ask_data(struct call *call)
{
    const size_t rest = call->size - call->got;
    struct message *message = ask(call, READ, &call->node->handle, 0);
    put_64(message, (uint64_t)call->offset + call->got);
    put_32(message, (uint32_t)(rest < most_read ? rest : most_read));
}

static bool answer_data(struct call *call, int error, struct reply *reply)
{
    size_t size;
    (void)error;
    get_optional_attributes(reply);
    get_32(reply); /* the count, which the data have too */
    const bool is_end = get_32(reply) != 0;
    const char *data = get_opaque(reply, &size, call->size - call->got);
    if (reply->is_short) {
        fuse_reply_err(call->request, EIO);
    } else if (call->got == 0 && (is_end || size == call->size)) {
        fuse_reply_buf(call->request, data, size);
    } else { /* in pieces */
        if (call->data == NULL)
            call->data = allocate(call->size);
        memcpy(call->data + call->got, data, size);
        call->got += size;
        if (!is_end && size > 0 && call->got < call->size) {
            ask_data(call);
            go(call, answer_data);
            return true;
        }
        fuse_reply_buf(call->request, call->data, call->got);
    }
    return false;
}

static void do_read(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset, struct fuse_file_info *file)
{
    struct call *call = begin(request, inode, file);
    call->size = size;
    call->offset = offset;
    ask_data(call);
    go(call, answer_data);
}

static bool answer_written(struct call *call, int error, struct reply *reply)
{
    struct node *node = call->node;
    struct stat before = node->attributes;
    (void)error;
    const bool has_before = get_before(reply, &before);
    const struct stat now = get_optional_attributes(reply);
    const uint32_t written = get_32(reply);
    if (reply->is_short) {
        fuse_reply_err(call->request, EIO);
        return false;
    }
    /* The kernel knows of what it has written itself. */
    if (has_before && now.st_mode != 0 && !has_changed(&node->attributes, &before))
        tell(node, &now);
    fuse_reply_write(call->request, written);
    return false;
}

static void do_write(fuse_req_t request, fuse_ino_t inode, const char *data, size_t size, off_t offset,
                     struct fuse_file_info *file)
{
    struct call *call = begin(request, inode, file);
    if (size > most_write)
        size = most_write;
    struct message *message = ask(call, WRITE, &call->node->handle, size);
    put_64(message, (uint64_t)offset);
    put_32(message, (uint32_t)size);
    put_32(message, file->flags & (O_SYNC | O_DSYNC) ? 2 : 0); /* FILE_SYNC, UNSTABLE */
    put_opaque(message, data, size);
    go(call, answer_written);
}

static void do_fsync(fuse_req_t request, fuse_ino_t inode, int only_data, struct fuse_file_info *file)
{
    struct call *call = begin(request, inode, file);
    struct message *message = ask(call, COMMIT, &call->node->handle, 0);
    (void)only_data;
    put_64(message, 0);
    put_32(message, 0); /* all of it */
    go(call, answer_done);
}

/* Folders. */

static void do_opendir(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file)
{
    (void)inode;
    struct listing *listing = allocate(sizeof *listing);
    file->fh = (uintptr_t)listing;
    if (fuse_reply_open(request, file) != 0)
        free(listing);
}

static void do_releasedir(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file)
{
    struct listing *listing = (struct listing *)(uintptr_t)file->fh;
    (void)inode;
    free(listing->entries);
    free(listing);
    fuse_reply_err(request, 0);
}

/* Answer with as much of a listing as fits, from entry `from` on. */
static void answer_entries(fuse_req_t request, const struct listing *listing, size_t size, size_t from, bool is_plus)
{
    char *buffer = allocate(size);
    size_t used = 0;
    const bool is_fresh = now_ms() - listing->read_ms < LISTED_MS;
    for (size_t i = from; i < listing->count; i++) {
        const struct listed *listed = &listing->entries[i];
        const bool is_other = strcmp(listed->name, ".") != 0 && strcmp(listed->name, "..") != 0;
        struct fuse_entry_param entry = {.attr = listed->attributes};
        struct node *node = NULL;
        size_t needed;
        if (is_plus && is_fresh && is_other && listed->handle.size > 0 && listed->attributes.st_mode != 0)
            node = introduce(&listed->handle, &listed->attributes, &entry);
        needed = is_plus
                     ? fuse_add_direntry_plus(request, buffer + used, size - used, listed->name, &entry, (off_t)i + 1)
                     : fuse_add_direntry(request, buffer + used, size - used, listed->name, &entry.attr, (off_t)i + 1);
        const bool fits = needed <= size - used;
        if (node != NULL) {
            node->lookups += fits;
            free_unused(node);
        }
        if (!fits)
            break;
        used += needed;
    }
    fuse_reply_buf(request, buffer, used);
    free(buffer);
}

static void ask_entries(struct call *call)
{
    struct message *message = ask(call, READDIRPLUS, &call->node->handle, 0);
    put_64(message, call->listing.cookie);
    put_bytes(message, call->listing.verifier, VERIFIER);
    put_32(message, MOST_DATA / 8); /* bytes of names */
    put_32(message, MOST_DATA / 2); /* bytes in all */
    go(call, list);
}

static bool list(struct call *call, int error, struct reply *reply)
{
    struct listing *listing = &call->listing;

    if (error != 0) {
        fuse_reply_err(call->request, error);
        return false;
    }
    get_optional_attributes(reply);
    memcpy(listing->verifier, get_bytes(reply, VERIFIER), VERIFIER);
    while (get_32(reply) != 0) {
        size_t size;
        struct listed new = {0};
        const uint64_t inode = get_64(reply);
        const char *name = get_opaque(reply, &size, MOST_NAME);
        memcpy(new.name, name, size);
        listing->cookie = get_64(reply);
        new.attributes = get_optional_attributes(reply);
        new.attributes.st_ino = inode;
        if (get_32(reply) != 0)
            new.handle = get_handle(reply);
        if (listing->count == listing->room) {
            listing->room = listing->room == 0 ? 64 : 2 * listing->room;
            listing->entries = realloc(listing->entries, listing->room * sizeof *listing->entries);
            if (listing->entries == NULL)
                abort();
        }
        listing->entries[listing->count++] = new;
    }
    const bool is_end = get_32(reply) != 0;
    if (reply->is_short) {
        fuse_reply_err(call->request, EIO);
        return false;
    }
    if (!is_end) {
        ask_entries(call);
        return true;
    }
    struct listing *kept = (struct listing *)(uintptr_t)call->file.fh;
    free(kept->entries);
    *kept = *listing;
    kept->read_ms = now_ms();
    *listing = (struct listing){0};
    answer_entries(call->request, kept, call->size, 0, call->is_plus);
    return false;
}

static void read_folder(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset, struct fuse_file_info *file,
                        bool is_plus)
{
    if (offset != 0) {
        answer_entries(request, (struct listing *)(uintptr_t)file->fh, size, (size_t)offset, is_plus);
        return;
    }
    struct call *call = begin(request, inode, NULL);
    call->file = *file;
    call->size = size;
    call->is_plus = is_plus;
    ask_entries(call);
}

static void do_readdir(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset, struct fuse_file_info *file)
{
    read_folder(request, inode, size, offset, file, false);
}

static void do_readdirplus(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset, struct fuse_file_info *file)
{
    read_folder(request, inode, size, offset, file, true);
}

/* The mount. */

static void do_init(void *unused, struct fuse_conn_info *connection)
{
    (void)unused;
    connection->want &= ~(unsigned)FUSE_CAP_ATOMIC_O_TRUNC; /* a SETATTR follows instead */
    connection->want |= connection->capable & (FUSE_CAP_PARALLEL_DIROPS | FUSE_CAP_CACHE_SYMLINKS);
    connection->max_write = (unsigned)most_write;
    connection->max_read = (unsigned)most_read;
    connection->max_background = 64;
    connection->congestion_threshold = 48;
}

static const struct fuse_lowlevel_ops operations = {
    .init = do_init,
    .lookup = do_lookup,
    .forget = do_forget,
    .getattr = do_getattr,
    .setattr = do_setattr,
    .readlink = do_readlink,
    .mkdir = do_mkdir,
    .unlink = do_unlink,
    .rmdir = do_rmdir,
    .symlink = do_symlink,
    .rename = do_rename,
    .link = do_link,
    .open = do_open,
    .read = do_read,
    .write = do_write,
    .fsync = do_fsync,
    .opendir = do_opendir,
    .readdir = do_readdir,
    .readdirplus = do_readdirplus,
    .releasedir = do_releasedir,
    .statfs = do_statfs,
    .create = do_create,
};

/* Wait for events of FUSE, if there is a session, and of a server, and serve them. False: FUSE's side has ended. */
static bool serve(struct server *from)
{
    static struct fuse_buf request;
    struct pollfd both[2] = {{.fd = -1}};
    int most_ms = rpc_wait(from, &both[0]);

    if (session != NULL) {
        both[1] = (struct pollfd){.fd = fuse_session_fd(session), .events = POLLIN};
        if (abandon_killed())
            most_ms = LOOK_MS;
    }
    if (poll(both, session != NULL ? 2 : 1, most_ms) < 0)
        both[0].revents = both[1].revents = 0; /* a signal */
    rpc_serve(from, both[0].revents);
    if (both[1].revents != 0) {
        const int size = fuse_session_receive_buf(session, &request);
        if (size > 0)
            fuse_session_process_buf(session, &request);
        else if (size != -EINTR && size != -EAGAIN)
            return false;
    }
    return session == NULL || !fuse_session_exited(session);
}

/* What a call has brought that was made before there is a folder. */
struct first {
    bool is_back;
    int error;
    void (*read)(struct reply *reply);
};

static void finish_first(void *owner, int error, struct reply *reply)
{
    struct first *first = owner;
    first->is_back = true;
    first->error = error != 0 ? -error : errno_of(get_32(reply));
    if (first->error == 0) {
        first->read(reply);
        first->error = reply->is_short ? EIO : 0;
    }
}

static int wait_for(struct server *from, struct message *message, void (*read)(struct reply *reply))
{
    struct first first = {.read = read};
    rpc_send(from, message, finish_first, &first);
    while (!first.is_back)
        serve(from);
    return first.error;
}

static void read_root(struct reply *reply)
{
    root.handle = get_handle(reply);
}

static void read_limits(struct reply *reply)
{
    get_optional_attributes(reply);
    const uint32_t read = get_32(reply);
    get_64(reply); /* what the server prefers */
    const uint32_t write = get_32(reply);
    if (read < most_read)
        most_read = read;
    if (write < most_write)
        most_write = write;
}

/* Ask for the export's handle, and what the server can. Returns 0 or an errno. */
static int ask_for_export(struct in_addr address, const char *export, int patience_ms)
{
    struct server mounts;
    rpc_open(&mounts, address, MOUNT_PORT, patience_ms);
    mounts.gives_up = true;
    struct message *message = rpc_begin(&mounts, MOUNT_PROGRAM, MOUNT_MNT, 0, 0, MOST_PATH);
    put_name(message, export);
    int error = wait_for(&mounts, message, read_root);
    if (mounts.fd >= 0)
        close(mounts.fd);
    free(mounts.received);
    if (error != 0)
        return error;
    *place_of(&root.handle) = &root;
    rpc_open(&server, address, NFS_PORT, patience_ms);
    server.gives_up = true;
    message = rpc_begin(&server, NFS_PROGRAM, FSINFO, 0, 0, 0);
    put_handle(message, &root.handle);
    error = wait_for(&server, message, read_limits);
    server.gives_up = false;
    return error;
}

int main(int count, char **words)
{
    const struct addrinfo internet = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found;
    char text[MOST_PATH];

    if (count != 6 || strlen(words[2]) >= MOST_PATH / 2) {
        fprintf(stderr, "usage: nfs_mount SERVER EXPORT FOLDER PATIENCE_MS FLAGS\n");
        return 1;
    }
    const char *name = words[1], *export = words[2], *folder = words[3], *flags = words[5];
    int error = getaddrinfo(name, NULL, &internet, &found);
    if (error != 0) {
        fprintf(stderr, "mount.nfs: %s: %s\n", name, gai_strerror(error));
        return 32; /* mount(8): mount failure */
    }
    error = ask_for_export(((struct sockaddr_in *)found->ai_addr)->sin_addr, export, atoi(words[4]));
    freeaddrinfo(found);
    if (error != 0) {
        fprintf(stderr, "mount.nfs: mounting %s:%s failed: %s\n", name, export, strerror(error));
        return 32;
    }
    snprintf(text, sizeof text, "-oallow_other,default_permissions,subtype=nfs,fsname=%s:%s,max_read=%zu%s%s", name, export,
             most_read, *flags ? "," : "", flags);
    char *arguments[] = {words[0], text, NULL};
    struct fuse_args options = FUSE_ARGS_INIT(2, arguments);
    session = fuse_session_new(&options, &operations, sizeof operations, NULL);
    if (session == NULL || fuse_set_signal_handlers(session) != 0 || fuse_session_mount(session, folder) != 0)
        return 32;
    if (fuse_daemonize(0) != 0)
        return 32;
    while (serve(&server))
        ;
    fuse_session_unmount(session);
    return 0;
}
